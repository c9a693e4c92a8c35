set -e
python3 conv.py
R=$(git rev-parse --show-toplevel)
SAN="-fsanitize=address -fsanitize=alignment,bounds -fno-sanitize-recover=alignment,bounds"
F="-O1 -g -fPIC -ffp-contract=off -mfma -w $SAN"
mkdir -p o
cat > mk <<M
all: libemu.so libcpu.so
CU = quantize loss reduce norm norm_fp8 norm_backward rope rope_heads rope_fp8 rope_lora swiglu swiglu_fp8 swiglu_lora swiglu_lora_backward lora lora_dw lora_widen embedding tiles
COMMON = tensor fp8 values check error quantize tokens
CPU = norm rope swiglu quantize loss reduce lora matmul embedding format device finite
libemu.so: \$(CU:%=o/%.cu.o) o/emu.o \$(COMMON:%=o/c_%.o) o/stubs.o
	g++ $SAN -shared -Wl,-Bsymbolic -o \$@ \$^
libcpu.so: \$(CPU:%=o/cpu_%.o) \$(COMMON:%=o/c_%.o)
	g++ $SAN -shared -Wl,-Bsymbolic -o \$@ \$^ -lopenblas -lm -lpthread
o/%.cu.o: src/kernels/cuda/%.cu emu.h \$(wildcard src/kernels/cuda/*.cuh)
	ccache g++ -x c++ -std=gnu++17 $F -I. -Isrc -I$R -I/usr/local/cuda/include -c \$< -o \$@
o/emu.o: emu.cpp emu.h
	ccache g++ -std=gnu++17 $F -fno-sanitize=address -I. -Isrc -I$R -I/usr/local/cuda/include -c \$< -o \$@
o/stubs.o: stubs.cpp emu.h
	ccache g++ -std=gnu++17 $F -I. -Isrc -I$R -I/usr/local/cuda/include -c \$< -o \$@
o/c_%.o: $R/kernels/%.c
	ccache gcc -std=c17 -D_GNU_SOURCE $F -I$R -c \$< -o \$@
o/cpu_%.o: $R/kernels/cpu/%.c
	ccache gcc -std=c17 -D_GNU_SOURCE $F -I$R $(pkg-config --cflags openblas 2>/dev/null) -c \$< -o \$@
M
make -k -j3 -f mk all
