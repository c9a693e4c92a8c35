#!/bin/bash
# speed before and after, two GPUs, all tests. .measure/before.tgz: the tree before.
. .measure/common.sh
mkdir -p build/before && tar xzf .measure/before.tgz -C build/before
(cd build/before && ln -sfn ../../.deps .deps && make --no-print-directory -j16 DEPS=.deps BACKEND=cuda build/cuda/train >../before.log 2>&1) & p=$!
build || exit 1
wait $p || { grep -m10 error build/before.log; exit 1; }
echo "before built after $SECONDS s"
bench() { # GPU WORK...
    local gpu=$1; shift
    CUDA_VISIBLE_DEVICES=$gpu XDG_CACHE_HOME=$PWD/build/cache$gpu timeout ${BENCH_LIMIT:-260} python3 -u scripts/bench_steps.py --launch "$L" --steps 5 --rounds 1 --folder build/bench$gpu \
        --train build/before/build/cuda/train --train build/cuda/train "$@" >build/bench$gpu.log 2>&1
    sed -n '/^| work/,$p' build/bench$gpu.log
    echo "GPU $gpu: $SECONDS s"
}
S="configs/Llama-2-7B.yaml --global_train_batch_size=32 --device_train_microbatch_size=8 --model.max_sequence_length=2048"
E="configs/Llama-3-8B.yaml --data.generate_doc_lengths=false"
mkdir -p build/cache0 build/cache1
bench 0 "7B: $S --recipe=coat" "lean: $S --recipe=coat-lean" \
    "documents: configs/Llama-2-7B.yaml --recipe=coat --model.max_sequence_length=4096 --global_train_batch_size=16 --device_train_microbatch_size=4 --data.packing=best_fit --data.paths=[{documents}]" & a=$!
bench 1 "8B: $E --recipe=coat --model.max_sequence_length=8192 --device_train_microbatch_size=2 --global_train_batch_size=8" \
    "32k: $E --recipe=coat-lean --model.max_sequence_length=32768 --device_train_microbatch_size=1 --global_train_batch_size=2" & b=$!
wait $a; wait $b
eval "$MORE"
if [ -n "$STAGES" ]; then
    timeout ${GPU_LIMIT:-200} bash scripts/gpu.sh $STAGES >build/gpu.log 2>&1
    echo "gpu.sh rc $? after $SECONDS s"; grep -E "FAILED" build/gpu-logs/table; grep -c " ok " build/gpu-logs/table
    tar czf $OUT/logs.tgz build/gpu-logs build/gpu.log
fi
tar czf $OUT/bench.tgz build/bench*.log build/*.log
echo "done after $SECONDS s"
