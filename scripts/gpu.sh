#!/bin/bash
# gpu.sh [build] [test] [sanitize] [bench]: everything that needs a GPU, in one go; without arguments all four stages.
# Ends with a table of what passed and how long it took; exits 1 if anything failed.
#   build     both back ends
#   test      the CPU tests, which record what the CUDA tests then compare with, and the CUDA tests
#   sanitize  compute-sanitizer: memcheck and racecheck on the CUDA kernel tests
#   bench     make bench: per kernel, and training steps of the whole model
# Settings in the environment: DEPS=prefix (default .deps if it is there), JOBS, LIMIT (seconds per sanitizer run).
cd "$(dirname "$0")/.." || exit 1
stages="${*:-build test sanitize bench}"
for s in $stages; do
    case $s in build|test|sanitize|bench) ;; *) sed -n '2,8s/^# //p' "$0"; exit 2 ;; esac
done
[ -z "$DEPS" ] && [ -d .deps ] && DEPS=.deps
jobs=${JOBS:-$(nproc)} limit=${LIMIT:-240}
make=(make --no-print-directory -j"$jobs" ${DEPS:+DEPS="$DEPS"})
logs=build/gpu-logs
mkdir -p $logs
table='' failed=0

run() {     # run NAME COMMAND...: shows the end of its output, and all of it if it fails; a line for the table
    local name=$1 begin=$SECONDS log=$logs/${1// /-}.log status
    shift
    echo "== $name"
    "$@" >"$log" 2>&1
    status=$?
    if [ $status -eq 0 ]; then tail -n 3 "$log"; else tail -n 60 "$log"; failed=1; fi
    table+=$(printf '%-44s %-14s %5d s' "$name" "$([ $status -eq 0 ] && echo ok || echo "FAILED ($status)")" \
             $((SECONDS - begin)))$'\n'
    return $status
}

# Tests that launch kernels of our own or of the libraries. The slow cases of two stay out.
sanitize() {
    local tool=$1 test filter
    shift
    for test in kernels attention kernel_gradients fp8 fp8_operations fp8_rope moments optimizer recipes cuda_matmul \
                cuda_attention; do
        [ -x build/cuda/tests/test_$test ] || continue
        case $test in cuda_matmul) filter=test_fp8 ;; cuda_attention) filter=test_small ;; *) filter= ;; esac
        run "$tool test_$test" timeout "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 \
            --target-processes application-only "$@" build/cuda/tests/test_$test $filter
    done
}

for stage in $stages; do
    case $stage in
    build)
        run "build for the CPU" "${make[@]}" BACKEND=cpu build-all
        run "build for CUDA" "${make[@]}" BACKEND=cuda build-all || break ;;
    test)
        export GOLDEN_DIR=build/golden
        run "tests of the CPU back end" "${make[@]}" BACKEND=cpu run-tests
        run "tests of the CUDA back end" "${make[@]}" BACKEND=cuda run-tests ;;
    sanitize)
        export GOLDEN_DIR=build/golden
        sanitize memcheck --leak-check no
        sanitize racecheck ;;
    bench)
        run "benchmarks" "${make[@]}" BACKEND=cuda bench
        cat $logs/benchmarks.log ;;
    esac
done
echo
printf '%s' "$table"
exit $failed
