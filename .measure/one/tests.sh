#!/bin/bash
. .measure/one/common.sh
(mkdir -p build/text && tar xJf .measure/text.txz -C build/text) & t=$!
gcc -O2 -fPIC -shared -I/usr/local/cuda/include .measure/ncclshim.c -o build/libshim.so -ldl -lrt
nvidia-smi -L; build || exit 1
wait $t
rm -rf build/curves build/curves.txt
STEPS=3 TAG=-quick curve coat 1; grep -E "^step|warn|error|memory" build/curve-coat-1-quick.log | tail -n 6
grep -q "step 3/" build/curve-coat-1-quick.log || tail -n 20 build/curve-coat-1-quick.log
timeout 260 bash scripts/gpu.sh test >build/gpu.log 2>&1; echo "gpu.sh test rc $? after $SECONDS s"
grep -E -A12 FAILED build/gpu.log | head -n 60; grep -c " ok " build/gpu-logs/table
cp -r build/gpu-logs build/test-logs
[ "$NOCURVES" ] || setsid bash .measure/one/curves.sh coat-1 coat-2 coat-3 bf16-1 >/dev/null 2>&1 </dev/null &
shim 2 test_comm_ranks test_kept_ranks test_fsdp_ranks test_empty_grads_ranks test_optimizer_ranks test_lora_ranks test_trainable_ranks test_convert_ranks
echo "shim after $SECONDS s"
LIMIT=230 timeout $((585 - SECONDS)) bash scripts/gpu.sh sanitize >build/san.log 2>&1; echo "sanitize rc $? after $SECONDS s"
grep -E -A12 FAILED build/san.log | head -n 60; cat build/gpu-logs/table
tar czf $OUT/logs.tgz build/test-logs build/gpu-logs build/*.log
show; echo "done after $SECONDS s"
