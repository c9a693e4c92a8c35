export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1
export XDG_CACHE_HOME=$PWD/build/cache; mkdir -p build/cache
L="mpirun --oversubscribe --bind-to none"
build() {
    make --no-print-directory -j16 DEPS=.deps BACKEND=cuda build-all build/cuda/kernel_times.so >build/cuda.log 2>&1 & local a=$!
    make --no-print-directory -j16 DEPS=.deps BACKEND=cpu build-all >build/cpu.log 2>&1 & local b=$!
    wait $a || { grep -m20 -E "error|Error" build/cuda.log; return 1; }
    wait $b || { grep -m20 -E "error|Error" build/cpu.log; return 1; }
    echo "built after $SECONDS s"
}
curve() {   # RECIPE SEED [ARG..]
    local recipe=$1 seed=$2 s=$SECONDS; shift 2
    $L -n 1 build/cuda/train configs/OLMo-1B.yaml --recipe=$recipe --seed=$seed --data.paths='[build/text/part-*.npy]' \
        --global_train_batch_size=32 --device_train_microbatch_size=16 --max_duration=${STEPS:-306} --scheduler.t_warmup=100 \
        --scheduler.warmup_min_lr=0 --eval_interval=${STEPS:-306} --evaluators='[{label: val, data: {paths: [build/text/val*.npy]}}]' \
        --device_eval_batch_size=16 --save_folder=build/curves/$recipe-$seed$TAG --save_num_checkpoints_to_keep=0 --save_interval_unsharded=null \
        --save_interval_ephemeral=null --save_interval=null --save_overwrite "$@" >build/curve-$recipe-$seed$TAG.log 2>&1
    echo "curve $recipe $seed$TAG rc $? $((SECONDS - s)) s" | tee -a build/curves.txt
}
show() {
    python3 - build/curves/*/ <<'P'
import json,sys,glob
for d in sys.argv[1:]:
    t=[];v=None
    for f in glob.glob(d+'/metrics.jsonl'):
        for l in open(f):
            try: d_=json.loads(l)
            except ValueError: continue
            if d_.get('train/CrossEntropyLoss') is not None: t.append(d_['train/CrossEntropyLoss'])
            for k in d_:
                if k.startswith('eval/') and k.endswith('CrossEntropyLoss'): v=d_[k]
    n=max(1,len(t)//10)
    if t: print('%s steps %d last %.4f training %.4f validation %s'%(d,len(t),t[-1],sum(t[-n:])/n,v))
P
}
shim() {    # RANKS TEST...
    local n=$1 t; shift
    for t; do
        timeout ${SHIM_LIMIT:-100} $L -n $n env LD_PRELOAD=$PWD/build/libshim.so build/cuda/tests/$t >build/shim-$n-$t.log 2>&1
        echo "shim $t on $n: rc $? $(grep -E 'PASSED|FAILED' build/shim-$n-$t.log | tail -n 2 | tr '\n' ' ')"
    done
}
