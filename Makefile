# make            build ./train: with CUDA if nvcc and a GPU are found, else for the CPU
# make demo       install what is missing, build for the CPU, train a small model on real tokens, draw the loss
# make test       build and run every test
# make quick      the same without the tests that take long or kill processes, on two ranks
# make format     lay out C and CUDA with clang-format; make format CHECK=1 only names what it would change
# make install    copy the program, scripts and configurations below PREFIX (/usr/local)
# make bench      time every kernel, training steps and, on a GPU, each kernel inside the steps
# make help       print this text
# make clean      remove what was built
#
# Settings, on the command line:
#   BACKEND=cpu|cuda   which back end                       SANITIZE=1|thread  address, undefined behaviour | data races
#   DEPS=prefix        libraries of your own, in prefix/include and prefix/lib: libfyaml, jansson, zlib, cmocka (tests), OpenBLAS
#   CUDA_HOME=... NCCL_HOME=...   if they are elsewhere    PREFIX=... DESTDIR=...   of make install
#   CC=... CFLAGS=... NVCCFLAGS=...                         MPIRUN=...    the launcher of demo and tests
#   ARCH="80 90a 120"  GPUs to compile for, by compute capability: 80 86 89 90a 100 120 ...; those found, else 90a

CUDA_HOME ?= /usr/local/cuda
NCCL_HOME ?= $(CUDA_HOME)
MPIRUN    ?= mpirun
NVCC      := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
BACKEND   ?= $(if $(and $(NVCC),$(wildcard /dev/nvidiactl)),cuda,cpu)
# printed if the choice may surprise
WHY       := $(if $(and $(NVCC),$(filter file,$(origin BACKEND)),$(filter cpu,$(BACKEND))),: nvcc but no GPU found; to compile for one: make BACKEND=cuda)
PKG        = $(shell pkg-config $(1) $(2) 2>/dev/null)

# A library is in DEPS, or pkg-config finds it, or the compiler may have it on its own paths.
ifdef DEPS
DEPS_FLAGS := -I$(DEPS)/include
DEPS_LIBS  := -L$(DEPS)/lib -Wl,-rpath,$(abspath $(DEPS)/lib)
endif
MPI_FLAGS  := $(or $(call PKG,--cflags,ompi-c),$(shell mpicc --showme:compile 2>/dev/null))
MPI_LIBS   := $(or $(call PKG,--libs,ompi-c),$(shell mpicc --showme:link 2>/dev/null))
YAML_LIBS  := $(if $(DEPS),-lfyaml,$(or $(call PKG,--libs,libfyaml),-lfyaml))
JSON_LIBS  := $(if $(DEPS),-ljansson,$(or $(call PKG,--libs,jansson),-ljansson))
ZLIB_LIBS  := $(if $(DEPS),-lz,$(or $(call PKG,--libs,zlib),-lz))
BLAS_FLAGS := $(call PKG,--cflags,openblas)
BLAS_LIBS  := $(or $(call PKG,--libs,openblas),-lopenblas)

# Required flags come first, then CFLAGS and NVCCFLAGS of the user.
CC_FLAGS  := -std=c17 -D_GNU_SOURCE -O2 -g -Wall -Wextra -Wno-missing-field-initializers -ffp-contract=off -I. $(DEPS_FLAGS) $(MPI_FLAGS)
NV_FLAGS  := -std=c++17 -O3 -lineinfo -I. $(DEPS_FLAGS)
LIBS      := $(DEPS_LIBS) $(YAML_LIBS) $(JSON_LIBS) $(ZLIB_LIBS) $(MPI_LIBS) -lm -lpthread -ldl
ifeq ($(BACKEND),cuda)
CC_FLAGS  += -I$(CUDA_HOME)/include -I$(NCCL_HOME)/include
# The GPUs found, of compute capability 8.0 and later. ARCH of the environment is ignored: it may be the processor's architecture.
ifneq ($(origin ARCH),command line)
GPUS      := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
               sed -nE 's/^([89]|[1-9][0-9])\.([0-9])$$/\1\2/p' | sort -nu)
ARCH      := $(or $(patsubst 90,90a,$(GPUS)),90a)
endif
# Also PTX of the last architecture, which drivers compile for later GPUs. PTX of 90a would run only on 9.0.
NV_FLAGS  += $(foreach a,$(ARCH),-gencode=arch=compute_$a,code=sm_$a) -DARCHITECTURES='"$(strip $(ARCH))"'
NV_FLAGS  += $(foreach a,$(filter-out %a %f,$(lastword $(ARCH))),-gencode=arch=compute_$a,code=compute_$a)
CUDA_LIBS := $(foreach d,$(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib $(NCCL_HOME)/lib),-L$d -Wl,-rpath,$d)
LIBS      += $(CUDA_LIBS) -lcudart -lcublasLt -lnccl -lstdc++
else ifeq ($(BACKEND),cpu)
CC_FLAGS  += $(BLAS_FLAGS)
LIBS      += $(BLAS_LIBS)
else
$(error BACKEND=$(BACKEND): expected cpu or cuda)
endif
ifeq ($(SANITIZE),thread)
CC_FLAGS  += -fsanitize=thread
LIBS      += -fsanitize=thread
# Reports go to files, which run-tests counts, so that none is overlooked: some tests expect that the program fails.
export TSAN_OPTIONS   = suppressions=$(CURDIR)/tests/tsan.supp:log_path=$(CURDIR)/$B/test-logs/report
# The sanitizer of older compilers finds no place for its memory if addresses are randomized by more than 28 bits
# (vm.mmap_rnd_bits).
FIXED     := $(shell setarch -R true 2>/dev/null && echo setarch -R)
else ifdef SANITIZE
CC_FLAGS  += -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
LIBS      += -fsanitize=address,undefined
# OpenMPI's own leaks are not reported. Tests of errors fork, which would be slow with the 256 MB of freed memory that the
# sanitizer keeps by default.
export LSAN_OPTIONS  := suppressions=tests/lsan.supp:print_suppressions=0
export ASAN_OPTIONS  := quarantine_size_mb=32
export UBSAN_OPTIONS := print_stacktrace=1
endif

B         := build/$(BACKEND)$(if $(SANITIZE),-$(if $(filter thread,$(SANITIZE)),thread,sanitize))
SOURCES   := $(wildcard model/*.c model/*/*.c data/*.c kernels/*.c kernels/runtime/*.c kernels/$(BACKEND)/*.c kernels/$(BACKEND)/*.cu)
OBJECTS   := $(SOURCES:%=$B/%.o)
# tests/test_X.c is a test; those that belong to one back end say so in their name.
TESTS     := $(patsubst %.c,$B/%,$(filter-out $(if $(filter cuda,$(BACKEND)),tests/test_cpu_%,tests/test_cuda_%),\
               $(wildcard tests/test_*.c)))
HELPERS   := $(patsubst %,$B/%.o,$(filter-out tests/test_% tests/bench_% tests/fuzz%,$(wildcard tests/*.c)))

# OpenMPI runs as root only with both variables. Tests may have more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
LAUNCH    := $(MPIRUN) --oversubscribe --bind-to none

train: $B/train
	@cp -f $< $@ && echo "built ./train for $(BACKEND)$(WHY)"
$B/train: $B/train.c.o $(OBJECTS)
	@echo "  LINK  $@"
	@$(CC) $^ $(LIBS) $(LDFLAGS) -o $@
$(TESTS) $B/tests/fuzz: $B/%: $B/%.c.o $(HELPERS) $(OBJECTS)
	@echo "  LINK  $@"
	@$(CC) $^ $(DEPS_LIBS) -lcmocka $(LIBS) $(WRAP) $(LDFLAGS) -o $@
# This one records the order of marks and waits.
$B/tests/test_cpu_order_ranks: WRAP = $(foreach f,device_mark device_queue device_sync device_wait quantize_with_amax,-Wl,--wrap=$f)
# This one shares the maxima of FP8 operands among ranks.
$B/tests/test_tensor_ranks: WRAP = -Wl,--wrap=scale_within_range
$B/tests/test_context_ranks: WRAP = -Wl,--wrap=scale_within_range -Wl,--wrap=context_leave_out
# This one replaces the size of a device's memory.
$B/tests/test_resident_ranks: WRAP = $(foreach f,device_memory_total device_memory_used,-Wl,--wrap=$f)
# This one pretends that the GPU has no FP8, and checks that no model is allocated.
$B/tests/test_cpu_no_fp8: WRAP = -Wl,--wrap=device_has_fp8 -Wl,--wrap=model_alloc
# This one is also ./train: it starts itself as ranks whose calls are slow or hang.
$B/tests/test_hangs: $B/train.c.o
$B/tests/test_hangs: WRAP = $(foreach f,backend_attention_forward checkpoint_latest folder_clean folder_publish folder_remove_step \
                                      log_open main map_file numpy_shuffle pwrite shard_read weight_files_open yaml_load,-Wl,--wrap=$f)
# This one records which files are opened, and continues after an error.
$B/tests/fuzz: $(patsubst %,$B/tests/fuzz_%.c.o,kinds seeds codes inputs)
$B/tests/fuzz: WRAP = -Wl,--wrap=fopen -Wl,--wrap=open -Wl,--wrap=truncate -Wl,--wrap=exit \
                     -Wl,--wrap=comm_agree -Wl,--wrap=comm_disagreement
# This one replaces the speed of a device.
$B/tests/test_flops: WRAP = -Wl,--wrap=device_peak_flops
# This one replaces NVML, and pretends that it has a GPU.
$B/tests/test_cpu_health_ranks: WRAP = $(foreach f,dlopen dlsym device_health,-Wl,--wrap=$f)
$B/tests/bench_%: $B/tests/bench_%.c.o $(OBJECTS)
	@echo "  LINK  $@"
	@$(CC) $^ $(LIBS) $(WRAP) $(LDFLAGS) -o $@
# This one is also ./train: it measures what a momentum in other formats would have been.
$B/tests/bench_momentum: $B/train.c.o
$B/tests/bench_momentum: WRAP = -Wl,--wrap=muon_momentum -Wl,--wrap=muon_normalize
# CUDA loads this one into ./train and reports kernels to it. CUPTI's records depend on its version, so copies in Python packages
# are not used, unless CUPTI_HOME names their folder.
CUPTI_PLACES = $(or $(CUPTI_HOME),$(CUDA_HOME)/extras/CUPTI $(CUDA_HOME)/targets/x86_64-linux $(CUDA_HOME))
CUPTI        = $(firstword $(wildcard $(foreach p,$(CUPTI_PLACES),$p/lib64/libcupti.so.1[3-9] $p/lib/libcupti.so.1[3-9])))
$B/kernel_times.so: scripts/kernel_times.c
	@mkdir -p $(@D)
	@[ -n "$(CUPTI)" ] || { echo "no CUPTI of CUDA 13 in $(CUPTI_PLACES): apt-get install cuda-cupti-dev-13-0, or give CUPTI_HOME=" \
	    "the folder nvidia/cu13 of pip's nvidia-cuda-cupti of nvcc's version, with include/ and lib/"; exit 1; }
	@echo "  CC    $<"
	@$(CC) -std=c17 -O2 -g -Wall -Wextra $(CFLAGS) -shared -fPIC -fvisibility=hidden -I$(dir $(CUPTI))../include \
	    -I$(CUDA_HOME)/include $< $(CUPTI) -Wl,-rpath,$(abspath $(dir $(CUPTI))),--disable-new-dtags -lpthread -ldl -o $@
# Compiling a test takes longer than running its own code, except in tests that compute a lot themselves.
$B/tests/test_%.c.o: CC_FLAGS += -O0
$(patsubst %,$B/tests/test_%.c.o,attention coded_export context_ranks experts_swiglu lora mesh rare_rows): CC_FLAGS += -O1
$B/%.c.o: %.c | check
	@mkdir -p $(@D)
	@echo "  CC    $<"
	@$(CC) $(CC_FLAGS) $(CFLAGS) -MMD -MP -c $< -o $@
$B/%.cu.o: %.cu $B/arch | check
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	@$(NVCC) $(NV_FLAGS) $(NVCCFLAGS) -MMD -MP -c $< -o $@

# The architectures for which .cu files were compiled. When ARCH changes, this file becomes newer than the objects.
$B/arch: always
	@mkdir -p $(@D)
	@echo '$(ARCH)' | cmp -s - $@ || echo '$(ARCH)' >$@

# Prints what was found, once per build folder, and what a missing library means.
check: $B/found
$B/found:
	@mkdir -p $(@D)
	@sh scripts/check-libraries "$(BACKEND)" "$(CC)" "$(CC_FLAGS) $(CFLAGS)" "$(LIBS) $(LDFLAGS)" "$(NVCC)"
	@touch $@

# Scripts find the table of keys in ../configs.
DEST       = $(DESTDIR)$(or $(PREFIX),/usr/local)
install: $B/train
	@mkdir -p $(addprefix $(DEST)/,bin share/coat/scripts share/coat/configs share/bash-completion/completions)
	@cp -f $< $(DEST)/bin/train
	@cp -f $(filter-out %__pycache__,$(wildcard scripts/*)) $(DEST)/share/coat/scripts
	@cp -f configs/* $(DEST)/share/coat/configs
	@$< --completion >$(DEST)/share/bash-completion/completions/train
	@echo "installed $(DEST)/bin/train for $(BACKEND), and $(DEST)/share/coat: scripts, configs"

# Libraries are installed first. The rest runs in a make of its own, because make asks pkg-config when it starts.
INSTALL    = $(if $(DEPS),:,sh scripts/install-libraries)
PARALLEL   = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))
demo:
	@$(INSTALL)
	@$(MAKE) --no-print-directory $(PARALLEL) BACKEND=cpu run-demo
run-demo: $B/train
	@echo "training configs/tiny.yaml with $(MPIRUN) -n 2"
	@OPENBLAS_NUM_THREADS=1 $(LAUNCH) -n 2 $B/train configs/tiny.yaml --save_folder=$B/demo --save_overwrite
test:
	@$(INSTALL) libcmocka-dev
	@$(MAKE) --no-print-directory $(PARALLEL) run-tests
# A build with AddressSanitizer leaves these tests out. Those of the first three lines start the program many times, and each
# start takes seconds with the sanitizer. Those of the last line would take minutes; they check memory, queues, times and numbers,
# which the sanitizer does not see, and other tests run the same code with it. A build with ThreadSanitizer, which CI does not
# use, runs all tests.
STARTS     = $(patsubst %,$B/tests/test_%,average_runs batch_warmup calibrate_runs data_ends divergence duration eval_only extend faults \
             generate hangs length_warmup lora_runs mix_runs moved pipeline_runs save_folder signals skips train train_parity \
             verify \
             cpu_order_ranks operations plan_time fp8_ranges lifetimes gradients recipe_columns)
run-tests: build-all
	@$(FIXED) bash scripts/run-tests $B "$(LAUNCH)" $(if $(filter-out thread,$(SANITIZE)),$(filter-out $(STARTS),$(TESTS)),\
	    $(TESTS) $(wildcard tests/test_*.py))
quick:
	@$(INSTALL) libcmocka-dev
	@$(MAKE) --no-print-directory $(PARALLEL) run-quick
# make quick leaves these tests out, and runs the others on two ranks. test_train_parity starts the program.
LONG       = average_runs batch_warmup calibrate_runs checkpoint_async checkpoint_folders coded_export context_ranks \
             cpu_order_ranks data_ends divergence duration empty_grads_ranks eval_only extend faults fp8_ranges fsdp_ranks \
             generate hangs host_ranks hosts_ranks length_warmup lifetimes lora_runs mix_runs moved operations pipeline_ranks \
             pipeline_runs plan_time rare_rows recipe_columns resident_ranks resume_ranks save_folder signals skips telemetry \
             traffic_ranks train trainable_ranks verify
QUICK      = $(filter-out $(LONG:%=$B/tests/test_%),$(TESTS))
SLOW_PY    = chat_messages chat_random convert_config generate_images golden_checkpoints image_features make_shards \
             preference stored_values random_meshes random_runs rank_files terminal train_sbatch watch watch_browser
QUICK_PY   = $(filter-out $(SLOW_PY:%=tests/test_%.py),$(wildcard tests/test_*.py))
run-quick: $B/train $(QUICK)
	@RANKS=2 bash scripts/run-tests $B "$(LAUNCH)" $(QUICK) $(QUICK_PY)
build-all: $B/train $(TESTS) $B/tests/bench_kernels $B/tests/fuzz
bench: $B/tests/bench_kernels $B/train
	-@[ $(BACKEND) != cuda ] || $(MAKE) --no-print-directory BACKEND=cuda $B/kernel_times.so
	@sh scripts/bench $B "$(LAUNCH)"

# Its versions format differently, so one version is required: pip install clang-format==19.1.7
CLANG_FORMAT ?= clang-format
format:
	@$(CLANG_FORMAT) --version 2>/dev/null | grep -qF ' 19.1.7' || { echo "need clang-format 19.1.7: pip install clang-format==19.1.7"; exit 1; }
	@$(CLANG_FORMAT) $(if $(CHECK),--dry-run -Werror,-i) $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
clean:
	rm -rf build train
.PHONY: train install demo run-demo test run-tests quick run-quick build-all bench format check help clean always
.SECONDARY:
-include $(shell find build -name '*.d' 2>/dev/null)
