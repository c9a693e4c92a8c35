#!/bin/bash
# build, a quick run, then loss curves on both GPUs beside all tests and sanitizers
. .measure/common.sh
build || exit 1
mkdir -p build/text && tar xJf .measure/text.txz -C build/text
curve() {   # GPU RECIPE SEED [ARG..]
    local gpu=$1 recipe=$2 seed=$3 s=$SECONDS; shift 3
    CUDA_VISIBLE_DEVICES=$gpu $L -n 1 build/cuda/train configs/OLMo-1B.yaml --recipe=$recipe --seed=$seed --data.paths='[build/text/part-*.npy]' \
        --global_train_batch_size=32 --device_train_microbatch_size=16 --max_duration=${STEPS:-306} --scheduler.t_warmup=100 \
        --scheduler.warmup_min_lr=0 --eval_interval=${STEPS:-306} --evaluators='[{label: val, data: {paths: [build/text/val*.npy]}}]' \
        --device_eval_batch_size=16 --save_folder=build/curves/$recipe-$seed$TAG --save_num_checkpoints_to_keep=0 --save_interval_unsharded=null \
        --save_interval_ephemeral=null --save_interval=null --save_overwrite "$@" >build/curve-$recipe-$seed$TAG.log 2>&1
    echo "curve $recipe $seed rc $? $((SECONDS - s)) s: $(python3 - build/curves/$recipe-$seed$TAG <<'P'
import json,sys,glob
t=[];v=None
for f in glob.glob(sys.argv[1]+'/metrics.jsonl'):
    for l in open(f):
        d=json.loads(l)
        if d.get('train/CrossEntropyLoss') is not None: t.append(d['train/CrossEntropyLoss'])
        for k in d:
            if k.startswith('eval/') and k.endswith('CrossEntropyLoss'): v=d[k]
n=max(1,len(t)//10)
print('steps %d training %.4f validation %s'%(len(t),sum(t[-n:])/n,v))
P
)"
}
STEPS=3 TAG=-quick curve 0 coat 1
STEPS=3 TAG=-quick curve 1 coat-lean 1
tail -n 4 build/curve-coat-1-quick.log
grep -q "rc 0" <<<"$(grep -c '^step 3/' build/curve-coat-1-quick.log | sed 's/^1$/rc 0/')" || { tail -20 build/curve-coat-1-quick.log; tail -20 build/curve-coat-lean-1-quick.log; }
eval "$CURVES0" & a=$!
eval "$CURVES1" & b=$!
if [ -n "$STAGES" ]; then
    timeout ${GPU_LIMIT:-420} bash scripts/gpu.sh $STAGES >build/gpu.log 2>&1
    echo "gpu.sh rc $? after $SECONDS s"; grep -E "FAILED|ok" build/gpu.log | sort | uniq | grep -v " ok " | head -40; grep -c " ok " build/gpu-logs/table
    tar czf $OUT/logs.tgz build/gpu-logs build/gpu.log
fi
wait $a; wait $b
tar czf $OUT/curves.tgz build/curve-*.log build/curves/*/metrics.jsonl
echo "done after $SECONDS s"
