export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NCCL_NVLS_ENABLE=0
export XDG_CACHE_HOME=$PWD/build/cache; mkdir -p build/cache
L="mpirun --oversubscribe --bind-to none"
build() {      # both back ends at once
    make --no-print-directory -j16 DEPS=.deps BACKEND=cuda build-all build/cuda/kernel_times.so >build/cuda.log 2>&1 & local a=$!
    make --no-print-directory -j16 DEPS=.deps BACKEND=cpu build-all >build/cpu.log 2>&1 & local b=$!
    wait $a || { grep -m20 -E "error|Error" build/cuda.log; return 1; }
    wait $b || { grep -m20 -E "error|Error" build/cpu.log; return 1; }
    echo "built after $SECONDS s"
}
