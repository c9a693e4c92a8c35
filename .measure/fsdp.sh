#!/bin/bash
# FULL_SHARD on two GPUs against one: two runs on one GPU each at the same time, then one run on both, with as much work for each GPU
# (Llama-2-7B coat, 4 micro-batches of 8 x 2048 a step, 5 steps, mean of steps 3 to 5). From the root of a tree with build/cuda/train.
#   fsdp.sh [PROGRAM..]     default build/cuda/train; of several (before, after) each makes both runs: some 75 s a program
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
dir=${FSDP_FOLDER:-build/fsdp}
mkdir -p $dir
tokens=$(python3 - $dir <<'P'
import sys; sys.path.insert(0, "scripts")
import bench_steps; print(bench_steps.write_tokens(sys.argv[1])["tokens"])
P
) || exit 1

steps() {       # NAME PROGRAM RANKS [KEY..]
    local name=$1 program=$2 ranks=$3; shift 3
    timeout 80 mpirun --oversubscribe --bind-to none -n $ranks $program configs/Llama-2-7B.yaml --recipe=coat --model.max_sequence_length=2048 \
        --device_train_microbatch_size=8 --global_train_batch_size=$((32 * ranks)) --max_duration=5 --data.paths="[$tokens]" \
        --data.memmap_dtype=uint16 --save_folder=$dir/$name --save_overwrite --save_num_checkpoints_to_keep=0 \
        --save_interval_unsharded=null --save_interval_ephemeral=null --eval_interval=null "$@" >$dir/$name.log 2>&1
}

for program in "${@:-build/cuda/train}"; do
    start=$SECONDS
    CUDA_VISIBLE_DEVICES=0 steps one-0 $program 1 & a=$!
    CUDA_VISIBLE_DEVICES=1 steps one-1 $program 1 & b=$!
    wait $a; ra=$?; wait $b; rb=$?
    middle=$SECONDS
    steps two $program 2 --fsdp.sharding_strategy=FULL_SHARD; rt=$?
    echo "== $program: single runs $((middle - start)) s (rc $ra, $rb), on two $((SECONDS - middle)) s (rc $rt)"
    [ $ra$rb$rt = 000 ] || { tail -n 15 $dir/one-0.log $dir/one-1.log $dir/two.log; continue; }
    grep -hE "^memory plan|^  activations|^shards of|symmetric window" $dir/two.log
    python3 - $dir <<'P'
import sys; sys.path.insert(0, "scripts")
import bench_steps
one = [bench_steps.measure(f"{sys.argv[1]}/one-{i}", 1) for i in (0, 1)]
two = bench_steps.measure(f"{sys.argv[1]}/two", 2)
for name, r in (("GPU 0 alone", one[0]), ("GPU 1 alone", one[1]), ("both, each", two)):
    print(f"{name}: {r.speed:,.0f} tokens/s, {r.memory:.1f} GiB, {r.watts:.0f} W, {r.clock:.0f} MHz")
# a step on two waits for the slower GPU, so both ratios are told
print(f"ratio per GPU: {2 * two.speed / (one[0].speed + one[1].speed):.4f} of their mean, {two.speed / min(r.speed for r in one):.4f} of the slower")
P
done
