#!/bin/bash
# gpu.sh [build] [test] [sanitize] [bench] [shard] [works]: runs everything that needs GPUs; without arguments all stages except
# works. It ends with a table of results and times, and exits 1 if anything failed. Logs are in build/gpu-logs.
#   build     both back ends
#   test      all CUDA tests, several at a time
#   sanitize  compute-sanitizer: memcheck and racecheck on the CUDA kernel tests
#   Before `test` and `sanitize`, the CPU tests record reference results. Both stages need what `build` has built.
#   bench     make bench: per kernel, training steps of the whole model on one GPU, and which kernels run inside them
#   shard     speed and memory of FSDP on all GPUs (2 or more)
#   works     models, lengths and recipes: speed, memory, watts, tokens per joule, and which kernels run (about 15 minutes)
# gpu.sh compare TRAIN_A TRAIN_B [WORK...]: runs works with two programs, A B A B, without kernels, and prints a table of pairs. WORK:
# a work of scripts/bench_steps.py; default all.
# Settings in the environment: DEPS=prefix (default .deps if it exists), JOBS (number at a time), LIMIT (seconds per run),
# RECIPES and STEPS of scripts/bench, ROUNDS of works and compare.
cd "$(dirname "$0")/.." || exit 1
stages="${*:-build test sanitize bench shard}"
[ "$1" = compare ] && [ -x "$2" ] && [ -x "$3" ] && stages=
for s in $stages; do
    case $s in build|test|sanitize|bench|shard|works) ;; *) sed -n '2,16s/^# //p' "$0"; exit 2 ;; esac
done
[ -z "$DEPS" ] && [ -d .deps ] && DEPS=.deps
jobs=${JOBS:-$(nproc)} limit=${LIMIT:-400}
make=(make --no-print-directory -j"$jobs" ${DEPS:+DEPS="$DEPS"})
logs=build/gpu-logs
rm -rf $logs
mkdir -p $logs
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export GOLDEN_DIR=build/golden BUILD=build/cuda LAUNCH="${MPIRUN:-mpirun --oversubscribe --bind-to none}"
kernel_tests="kernels head distill attention rope kernel_gradients fp8 fp8_operations fp8_ranges fp8_rope lora lora_added nf4 moments"
kernel_tests="$kernel_tests optimizer adamw8bit muon finite router experts experts_swiglu"
gpus=$(nvidia-smi -L | grep -c '^GPU')
works=(7B 7B-lean 8B 7B-documents 8B-32k 8B-128k)
[ "$gpus" -ge 2 ] && works+=(7B-fsdp)

bench_steps() {     # bench_steps ARGUMENT...: prints the table
    python3 -u scripts/bench_steps.py --launch "$LAUNCH" --steps "${STEPS:-6}" ${ROUNDS:+--rounds "$ROUNDS"} "$@"
}

run() {     # run NAME COMMAND...: adds a line to the table; if the command fails, prints the end of its output
    local name=$1 begin=$SECONDS log=$logs/${1// /-}.log status
    shift
    timeout "$limit" "$@" >"$log" 2>&1
    status=$?
    printf '%-50s %-14s %5d s\n' "$name" "$([ $status -eq 0 ] && echo ok || echo "FAILED ($status)")" $((SECONDS - begin)) \
        | tee -a $logs/table
    grep '^SKIPPED ' "$log" | sort -u | sed "s|^|$name: |" | tee -a $logs/table       # cases that need more GPUs
    [ $status -eq 0 ] || { grep -E 'ERROR|error|FAILED|Invalid|hazard' "$log" | head -n 20; }
    return $status
}

next=0 recorded=
most=$((gpus > 2 ? 16 : 8 * gpus))
background() {  # as run, but in the background, at most `most` at a time
    while [ "$(jobs -rp | wc -l)" -ge $most ]; do wait -n; done
    run "$@" &
}

on_one() {      # as background, on one GPU, each time on the next one
    CUDA_VISIBLE_DEVICES=$((next++ % gpus)) background "$@"
}

record() {      # records the results of the CPU tests, once
    local test
    [ -n "$recorded" ] && return
    recorded=yes
    for test in $kernel_tests; do background "record test_$test" env OPENBLAS_NUM_THREADS=2 build/cpu/tests/test_$test; done
    wait
}

# Ranks on different GPUs wait for each other's time slices. So few such tests run at a time, after all other tests.
cuda_tests() {
    local test name n most=$most
    record
    for test in build/cuda/tests/test_*; do
        name=$(basename "$test")
        case $name in
        *.d|*.o|*test_cpu_*) ;;
        *ranks*) on_one "$name on 1" $LAUNCH -n 1 "$test" ;;
        *train|*train_parity|*_runs|*extend|*_warmup|*duration|*data_ends|*moved|*faults|*save_folder|*fit|*hangs|*signals|*divergence|*skips|*verify|*generate|*eval_only) background "$name" "$test" ;;
        *) [ -x "$test" ] && on_one "$name" "$test" ;;
        esac
    done
    wait
    most=3
    for test in build/cuda/tests/test_*_ranks; do
        for n in 2 4; do [ $n -le "$gpus" ] && background "$(basename "$test") on $n" $LAUNCH -n $n "$test"; done
    done
    wait
}

# sanitized OPTION... TEST: returns 9 if compute-sanitizer finds an error. Hazards that name a kernel of cuBLASLt (nvjet) do not
# count: cuBLASLt synchronizes in ways that racecheck does not see. NOTE: with --kernel-name-exclude for these kernels, racecheck
# ends with an internal error.
sanitized() {
    local text status
    text=$(compute-sanitizer --error-exitcode 9 --target-processes application-only "$@" 2>&1)
    status=$?
    printf '%s\n' "$text"
    [ $status -ne 9 ] && return $status
    grep -qE 'Internal Sanitizer Error|Target application returned an error' <<<"$text" && return 9
    text=$(grep 'Race reported' <<<"$text") || return 9
    ! grep -qv nvjet <<<"$text" || return 9
}
export -f sanitized

# NOTE: compute-sanitizer has three limits. (1) A process under it cannot fork, as tests of error messages do. (2) In the
# attention kernels for 9.0, one or two lanes arrive at barriers for their whole warp, after all lanes have met, and racecheck
# reports the accesses of the other lanes as hazards. If every lane arrives, it reports none for the same shape. So attention
# tests run only under memcheck. (3) racecheck is slow: the 2,048 codes of test_finite would take many minutes, and the other
# tests of test_finite run the same kernels. A whole model would take many minutes, and runs no further kernel of ours.
sanitize() {
    local tool test options
    declare -A without=([kernel_gradients]=test_attention [finite]=test_codes)     # tests that do not run under racecheck
    record
    for tool in racecheck memcheck; do
        options="--tool $tool"
        for test in ${kernel_tests/ attention/}; do
            on_one "$tool test_$test" env NO_FORK=1 bash -c "sanitized $options build/cuda/tests/test_$test \
                $([ $tool = racecheck ] && echo "${without[$test]}")"
        done
        on_one "$tool test_cuda_experts" bash -c "sanitized $options build/cuda/tests/test_cuda_experts"
        on_one "$tool test_cuda_matmul" bash -c "sanitized $options build/cuda/tests/test_cuda_matmul test_fp8"
        [ $tool = racecheck ] && continue
        on_one "$tool test_attention" env NO_FORK=1 bash -c "sanitized $options build/cuda/tests/test_attention"
        for test in swiglu dx_swiglu; do
            on_one "$tool test_cuda_matmul $test" bash -c "sanitized $options build/cuda/tests/test_cuda_matmul test_$test"
        done
        for test in small pairs; do
            on_one "$tool test_cuda_attention $test" bash -c "sanitized $options build/cuda/tests/test_cuda_attention test_$test"
        done
    done
    for test in recipes recipe_columns; do
        on_one "memcheck test_$test" bash -c "sanitized $options build/cuda/tests/test_$test"
    done
    # NCCL asks which of its kernels exist for this GPU; memcheck would report these calls as failed.
    [ "$gpus" -ge 2 ] && background "memcheck test_fsdp_ranks on 2" \
        $LAUNCH -n 2 compute-sanitizer --error-exitcode 9 --target-processes application-only $options --report-api-errors no \
        build/cuda/tests/test_fsdp_ranks
    wait
}

if [ -z "$stages" ]; then
    [ $# -gt 3 ] && works=("${@:4}")
    bench_steps --train "$2" --train "$3" "${works[@]}"
    exit
fi
for stage in $stages; do
    echo "== $stage (after $SECONDS s)"
    case $stage in
    build)
        background "build for the CPU" "${make[@]}" BACKEND=cpu build-all
        background "build for CUDA" "${make[@]}" BACKEND=cuda build-all
        wait ;;
    test) cuda_tests ;;
    sanitize) limit=$((2 * limit)) sanitize ;;
    works)
        run "kernel_times.so" "${make[@]}" BACKEND=cuda build/cuda/kernel_times.so
        bench_steps --kernel-times build/cuda/kernel_times.so "${works[@]}" | tee $logs/works.log
        [ "${PIPESTATUS[0]}" -eq 0 ] || echo "works FAILED" >>$logs/table ;;
    bench)
        run "kernel_times.so" "${make[@]}" BACKEND=cuda build/cuda/kernel_times.so
        limit=$((2 * limit)) run "benchmarks" sh scripts/bench build/cuda "$LAUNCH"
        cat $logs/benchmarks.log ;;
    shard)
        [ "$gpus" -ge 2 ] || continue
        run "FSDP on $gpus" env STEPS_ONLY=1 RANKS="$gpus" sh scripts/bench build/cuda "$LAUNCH"
        cat "$logs/FSDP-on-$gpus.log" ;;
    esac
done
echo
sort $logs/table
! grep -q FAILED $logs/table
