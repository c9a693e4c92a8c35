. .measure/one/common.sh
pkill -f curves.sh; pkill -f bf16 ; pkill -x train; sleep 1
mkdir -p build/before && tar xzf .measure/before.tgz -C build/before
(cd build/before && ln -sfn ../../.deps .deps && make --no-print-directory -j16 DEPS=.deps BACKEND=cuda build/cuda/train >../before.log 2>&1) || tail -5 build/before.log
echo "before built after $SECONDS s"
S="configs/Llama-2-7B.yaml --global_train_batch_size=32 --device_train_microbatch_size=8 --model.max_sequence_length=2048"
E="configs/Llama-3-8B.yaml --data.generate_doc_lengths=false"
timeout 470 python3 -u scripts/bench_steps.py --launch "$L" --steps 5 --rounds 1 --folder build/bench \
    --train build/before/build/cuda/train --train build/cuda/train "7B: $S --recipe=coat" "lean: $S --recipe=coat-lean" \
    "8B: $E --recipe=coat --model.max_sequence_length=8192 --device_train_microbatch_size=2 --global_train_batch_size=8" \
    "32k: $E --recipe=coat-lean --model.max_sequence_length=32768 --device_train_microbatch_size=1 --global_train_batch_size=2" >build/bench.log 2>&1
grep -E "^memory|^  act" build/bench.log; sed -n '/^| work/,$p' build/bench.log; grep -c "^step" build/bench.log; grep error build/bench.log
cp build/bench.log build/before.log $OUT/
echo "after $SECONDS s"
