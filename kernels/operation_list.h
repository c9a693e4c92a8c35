/* OP(name, parameters, arguments, accesses): one row for each operation. kernels.h, experts.h, nf4_map.h,
 * gptq_layer.h, wire.h, collectives.h or runtime/device.h specifies the operation. operation_calls.c
 * defines the words of the last column, which names the memory that the operation reads and writes,
 * its matrix products and its ranks.
 *
 * test_operations finds accesses that a row forgets: it lets each operation see only the memory
 * that its row names. */

/* ---- formats */
OP(quantize, (Tensor y, Tensor x), (y, x), IN(x), OUT(y))
OP(quantize_with_amax, (Tensor y, Tensor x, const float *amax), (y, x, amax), IN(x),
   MEMORY(amax, sizeof *amax, READS), OUT(y))
OP(quantize_scale, (Tensor y, Tensor x), (y, x), IN(x), SCALE(y))
OP(quantize_scale_from, (Tensor y, const float *amax), (y, amax), MEMORY(amax, sizeof *amax, READS),
   SCALE(y))
OP(quantize_codes, (Tensor y, Tensor x), (y, x), IN(x), OUT_AS_SCALED(y))
OP(quantize_item_scales, (Tensor y, Tensor x, int items), (y, x, items), CODES(x, READS),
   ITEM_SCALES(x, items, READS), ITEM_SCALES(y, items, WRITES))
OP(quantize_item_codes, (Tensor y, Tensor x, int items), (y, x, items), CODES(x, READS),
   ITEM_SCALES(x, items, READS), CODES(y, WRITES), TRANSPOSED(y, WRITES),
   ITEM_SCALES(y, items, READS))
OP(quantize_in_range, (Tensor y, Tensor x), (y, x), IN(x), OUT(y))
OP(expand_operand, (Tensor y, Tensor x), (y, x), IN(x), OUT(y), TRANSPOSED(x, WRITES))
OP(init_normal, (Tensor w, float std, float cutoff, uint64_t seed, uint64_t first),
   (w, std, cutoff, seed, first), OUT(w))
OP(init_constant, (Tensor w, float value), (w, value), OUT(w))

/* ---- embedding */
OP(embedding_forward, (Tensor y, const TokenAt *sorted, Tensor w), (y, sorted, w),
   MEMORY(sorted, (size_t)y.rows * sizeof *sorted, READS), IN(w), OUT(y))
OP(embedding_backward, (Tensor dw, const TokenAt *sorted, Tensor dy), (dw, sorted, dy),
   MEMORY(sorted, (size_t)dy.rows * sizeof *sorted, READS), IN(dy), SUM(dw))

/* ---- rows of images */
OP(gelu_forward, (Tensor y, Tensor x), (y, x), IN(x), OUT(y))
OP(gelu_backward, (Tensor dx, Tensor dy, Tensor x), (dx, dy, x), IN(dy), IN(x), OUT(dx))
OP(place_rows, (Tensor y, const int *at, Tensor x), (y, at, x),
   MEMORY(at, (size_t)x.rows * sizeof *at, READS), IN(x), CODES(y, READS | WRITES))
OP(take_rows, (Tensor x, const int *at, Tensor y), (x, at, y),
   MEMORY(at, (size_t)x.rows * sizeof *at, READS), CODES(y, READS | WRITES), OUT(x))

/* ---- normalization */
OP(norm_forward,
   (Tensor y, Tensor x, float *stats, Tensor stream, Tensor w, Tensor residual, Norm norm,
    ForwardSource from),
   (y, x, stats, stream, w, residual, norm, from), IN(stream), IN(w), IN(residual), OUT(x),
   FLOATS(stats, x.rows, 2, WRITES), OUT(y))
OP(norm_recompute, (Tensor y, Tensor x, const float *stats, Tensor w), (y, x, stats, w), IN(x),
   FLOATS(stats, x.rows, 2, READS), IN(w), OUT_AS_SCALED(y))
OP(norm_backward,
   (Tensor dx, float *amax, Tensor dw, Tensor dy, Tensor x, const float *stats, Tensor w, Norm norm,
    bool accumulate),
   (dx, amax, dw, dy, x, stats, w, norm, accumulate), IN(dy), IN(x),
   FLOATS(stats, x.rows, 2, READS), IN(w), IN_IF(accumulate, dx), OUT(dx), SUM(dw),
   MEMORY(amax, sizeof *amax, WRITES))

/* ---- linear */
OP(matmul, (Tensor y, Tensor x, Tensor w, Tensor add), (y, x, w, add), IN(x), IN(w), IN(add),
   OUT(y), PRODUCTS(x.rows, w.rows, x.cols, x))
OP(fold_channels, (Tensor y, Tensor w, const float *channel), (y, w, channel), IN(w),
   FLOATS(channel, w.cols, 1, READS), CODES(y, WRITES), SCALE(y))
OP(matmul_dx, (Tensor dx, Tensor dy, Tensor w, bool accumulate), (dx, dy, w, accumulate), IN(dy),
   IN_TRANSPOSED(w), IN_IF(accumulate, dx), OUT(dx), PRODUCTS(dy.rows, dx.cols, dy.cols, dy))
OP(matmul_dw, (Tensor dw, Tensor dy, Tensor x), (dw, dy, x), IN_TRANSPOSED_IF(dw.data, dy),
   IN_TRANSPOSED_IF(dw.data, x), CHANNELS_IF(dw.data, x, READS), SUM(dw),
   PRODUCTS(dw.data ? dw.rows : 0, dw.cols, dy.rows, dy))
OP(matmul_db, (Tensor db, Tensor dy), (db, dy), IN_IF(db.data, dy), SUM(db))

/* ---- adapters */
OP(lora_narrow, (Tensor xa, Tensor x, LoraMatrix m, float scale), (xa, x, m, scale), IN(x), IN(m.w),
   OUT(xa))
OP(lora_widen, (Tensor y, Tensor xa, LoraMatrix m, Tensor add), (y, xa, m, add), IN(xa), IN(m.w),
   IN(add), OUT(y))
OP(lora_dw, (LoraMatrix dm, Tensor xa, Tensor x), (dm, xa, x), IN_IF(dm.w.data, xa),
   IN_IF(dm.w.data, x), SUM(dm.w))

/* ---- attention */
OP(rope_forward,
   (Tensor y, Tensor saved, float *stats, Tensor x, LoraProduct product, Tensor qnorm, Tensor knorm,
    Attention a, ForwardSource from),
   (y, saved, stats, x, product, qnorm, knorm, a, from), IN_WITH(x, product), ANGLES(a), IN(qnorm),
   IN(knorm), OUT(saved), QK_STATS(stats, x, qnorm, a, WRITES), OUT(y))
OP(rope_backward,
   (Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x, const float *stats, Tensor qnorm,
    Tensor knorm, Attention a),
   (dx, dqnorm, dknorm, dy, x, stats, qnorm, knorm, a), IN(dy), SPOILED(dy),
   IN_IF(a.clip > 0 || qnorm.data, x), QK_STATS(stats, dy, qnorm, a, READS), IN(qnorm), IN(knorm),
   ANGLES(a), OUT(dx), SUM(dqnorm), SUM(dknorm))
OP(attention_forward, (Tensor y, float *lse, Tensor qkv, Attention a, Documents docs),
   (y, lse, qkv, a, docs), IN(qkv), STARTS(docs), OUT(y), FLOATS(lse, y.rows, a.H, WRITES),
   SCRATCH(a), PRODUCTS_OF_KEYS(2, a, docs, qkv))
OP(attention_backward,
   (Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse, Attention a, Documents docs),
   (dqkv, dy, qkv, y, lse, a, docs), IN(dy), IN(qkv), IN(y), FLOATS(lse, y.rows, a.H, READS),
   STARTS(docs), OUT(dqkv), SCRATCH(a), PRODUCTS_OF_KEYS(5, a, docs, qkv))
OP(heads_split, (Tensor y, Tensor x, Attention heads), (y, x, heads), IN(x), OUT(y))
OP(heads_join, (Tensor x, Tensor y, Attention heads), (x, y, heads), IN(y), OUT(x))
OP(attention_cached, (Tensor y, Tensor qkv, KvCache cache, Attention a), (y, qkv, cache, a),
   IN(qkv), IN(cached(cache.k, 0, cache.length)), IN(cached(cache.v, 0, cache.length)),
   OUT(cached(cache.k, cache.length, qkv.rows)), OUT(cached(cache.v, cache.length, qkv.rows)),
   OUT(y))

/* ---- MLP */
OP(swiglu_forward,
   (Tensor act, Tensor gate_up, Tensor wide, LoraProduct product, ForwardSource from),
   (act, gate_up, wide, product, from), IN_WITH(wide, product), OUT(gate_up), OUT(act),
   CHANNELS_OUT(act))
OP(matmul_swiglu, (Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w),
   (act, gate_up, wide, x, w), IN(x), IN(w), OUT(wide), OUT(gate_up), OUT(act), CHANNELS_OUT(act),
   PRODUCTS(x.rows, w.rows, x.cols, x))
OP(swiglu_backward, (Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product, Tensor gate_up),
   (dgate_up, act, dact, product, gate_up), IN_WITH(dact, product), IN(gate_up), OUT_AS_SCALED(act),
   CHANNELS_IF(true, act, READS), OUT(dgate_up))
OP(matmul_dx_swiglu,
   (Tensor dgate_up, Tensor act, Tensor dact, Tensor dy, Tensor w, Tensor gate_up),
   (dgate_up, act, dact, dy, w, gate_up), IN(dy), IN_TRANSPOSED(w), IN(gate_up), OUT(dact),
   OUT_AS_SCALED(act), CHANNELS_IF(true, act, READS), OUT(dgate_up),
   PRODUCTS(dy.rows, dact.cols, dy.cols, dy))

/* ---- experts */
OP(route, (Routing r, Tensor logits, const float *bias, bool normalize),
   (r, logits, bias, normalize), IN(logits), FLOATS(bias, 1, r.experts, READS), ROUTING(r, WRITES))
OP(router_stats, (Tensor stats, Tensor logits, Routing r), (stats, logits, r), IN(logits),
   MEMORY(r.expert, sizeof(int) * assignments_of(r), READS), OUT(stats))
OP(router_sum, (Tensor sums, Tensor stats, int experts, float factor),
   (sums, stats, experts, factor), IN(stats), CODES(sums, READS | WRITES))
OP(route_backward,
   (Tensor dlogits, const float *dweight, Tensor logits, Routing r, bool normalize, Tensor counts,
    float balance, float z),
   (dlogits, dweight, logits, r, normalize, counts, balance, z), IN(logits), IN(counts),
   FLOATS(dweight, rows_of(r), 1, READS), MEMORY(r.expert, sizeof(int) * assignments_of(r), READS),
   MEMORY(r.row, sizeof(int) * assignments_of(r), READS), OUT(dlogits))
OP(experts_gather, (Tensor y, Tensor x, const float *amax, Routing r), (y, x, amax, r), IN(x),
   MEMORY(amax, sizeof *amax, READS), ROWS(r), OUT(y))
OP(experts_gather_again, (Tensor y, Tensor x, Routing r), (y, x, r), IN(x), ROWS(r),
   OUT_AS_SCALED(y))
OP(experts_sum, (Tensor y, Tensor x, Tensor add, Routing r), (y, x, add, r), IN(x), IN(add),
   MEMORY(r.row, sizeof(int) * assignments_of(r), READS), OUT(y))
OP(experts_matmul, (Tensor y, Tensor x, Tensor w, Routing r), (y, x, w, r), IN(x), IN(w),
   ITEM_SCALES(w, r.experts, READS), ROWS(r), OUT(y),
   PRODUCTS(assignments_of(r), w.rows / r.experts, x.cols, x))
OP(experts_matmul_dx, (Tensor dx, Tensor dy, Tensor w, Routing r), (dx, dy, w, r), IN(dy),
   IN_TRANSPOSED(w), ITEM_SCALES(w, r.experts, READS), ROWS(r), OUT(dx),
   PRODUCTS(assignments_of(r), dx.cols, dy.cols, dy))
OP(experts_matmul_dw, (Tensor dw, Tensor dy, Tensor x, Routing r), (dw, dy, x, r),
   IN_TRANSPOSED_IF(dw.data, dy), IN_TRANSPOSED_IF(dw.data, x), ROWS(r), SUM(dw),
   PRODUCTS(dw.data ? dw.rows / r.experts : 0, dw.cols, assignments_of(r), dy))
OP(experts_lora_narrow, (Tensor xa, Tensor x, LoraMatrix m, float scale, Routing r),
   (xa, x, m, scale, r), IN(x), IN(m.w), ROWS(r), OUT(xa))
OP(experts_lora_widen, (Tensor y, Tensor xa, LoraMatrix m, Routing r), (y, xa, m, r), IN(xa),
   IN(m.w), IN(y), ROWS(r), OUT(y))
OP(experts_lora_dw, (LoraMatrix dm, Tensor xa, Tensor x, Routing r), (dm, xa, x, r),
   IN_IF(dm.w.data, xa), IN_IF(dm.w.data, x), ROWS(r), SUM(dm.w))
OP(experts_swiglu, (Tensor act, Tensor gate_up, Tensor wide, Routing r, ForwardSource from),
   (act, gate_up, wide, r, from), IN(wide), ROWS(r), WEIGHTS(r), OUT(gate_up), OUT(act))
OP(experts_matmul_swiglu, (Tensor act, Tensor gate_up, Tensor wide, Tensor x, Tensor w, Routing r),
   (act, gate_up, wide, x, w, r), IN(x), IN(w), ITEM_SCALES(w, r.experts, READS), ROWS(r),
   WEIGHTS(r), OUT(wide), OUT(gate_up), OUT(act),
   PRODUCTS(assignments_of(r), w.rows / r.experts, x.cols, x))
OP(experts_swiglu_backward,
   (Tensor dgate_up, Tensor act, float *dweight, Tensor dact, Tensor gate_up, Routing r),
   (dgate_up, act, dweight, dact, gate_up, r), IN(dact), IN(gate_up), ROWS(r), WEIGHTS(r),
   OUT_AS_SCALED(act), FLOATS(dweight, rows_of(r), 1, WRITES), OUT(dgate_up))
OP(experts_matmul_dx_swiglu,
   (Tensor dgate_up, Tensor act, float *dweight, Tensor dact, Tensor dy, Tensor w, Tensor gate_up,
    Routing r),
   (dgate_up, act, dweight, dact, dy, w, gate_up, r), IN(dy), IN_TRANSPOSED(w),
   ITEM_SCALES(w, r.experts, READS), IN(gate_up), ROWS(r), WEIGHTS(r), OUT(dact),
   OUT_AS_SCALED(act), FLOATS(dweight, rows_of(r), 1, WRITES), OUT(dgate_up),
   PRODUCTS(assignments_of(r), dact.cols, dy.cols, dy))

/* ---- loss */
OP(cross_entropy,
   (Tensor logits, float *loss, float *zloss, const int *target, const float *weight, int vocab,
    float temperature, float scale, float z_weight, bool backward),
   (logits, loss, zloss, target, weight, vocab, temperature, scale, z_weight, backward), IN(logits),
   MEMORY(target, (size_t)logits.rows * sizeof *target, READS), LABEL_WEIGHTS(weight, logits),
   CODES(logits, backward ? WRITES : 0), FLOATS(loss, logits.rows, 1, WRITES),
   FLOATS(zloss, logits.rows, 1, WRITES))
OP(cross_entropy_codes,
   (Tensor gradient, float amax, Tensor logits, float *loss, float *zloss, const int *target,
    const float *weight, int vocab, float temperature, float scale, float z_weight),
   (gradient, amax, logits, loss, zloss, target, weight, vocab, temperature, scale, z_weight),
   IN(logits), MEMORY(target, (size_t)logits.rows * sizeof *target, READS),
   LABEL_WEIGHTS(weight, logits), OUT(gradient), FLOATS(loss, logits.rows, 1, WRITES),
   FLOATS(zloss, logits.rows, 1, WRITES))

OP(distill,
   (Tensor gradient, float amax, Tensor logits, float *loss, float *divergence, const int *target,
    SoftLabels labels, Distillation d, int vocab, float scale),
   (gradient, amax, logits, loss, divergence, target, labels, d, vocab, scale), IN(logits),
   MEMORY(target, (size_t)logits.rows * sizeof *target, READS),
   MEMORY(labels.column, CHOSEN(logits, labels.k), READS),
   MEMORY(labels.probability, CHOSEN(logits, labels.k), READS),
   FLOATS(labels.tail, logits.rows, 1, READS), OUT(gradient), FLOATS(loss, logits.rows, 1, WRITES),
   FLOATS(divergence, logits.rows, 1, WRITES))
OP(row_entropy, (float *entropy, Tensor logits, const int *target, int vocab, float temperature),
   (entropy, logits, target, vocab, temperature), IN(logits),
   MEMORY(target, (size_t)logits.rows * sizeof *target, READS),
   FLOATS(entropy, logits.rows, 1, WRITES))
OP(top_columns,
   (int *column, float *logp, Tensor logits, const int *target, int vocab, float temperature,
    int k),
   (column, logp, logits, target, vocab, temperature, k), IN(logits),
   MEMORY(target, (size_t)logits.rows * sizeof *target, READS),
   MEMORY(column, CHOSEN(logits, k), WRITES), MEMORY(logp, CHOSEN(logits, k), WRITES))
OP(draw_columns,
   (int *column, float *logp, Tensor logits, const int *target, int vocab, float temperature, int k,
    uint64_t seed),
   (column, logp, logits, target, vocab, temperature, k, seed), IN(logits),
   MEMORY(target, (size_t)logits.rows * sizeof *target, READS),
   MEMORY(column, CHOSEN(logits, k), WRITES), MEMORY(logp, CHOSEN(logits, k), WRITES))

/* ---- reductions and the optimizer */
OP(sum_values, (float *out, const float *x, size_t n), (out, x, n), MEMORY(x, n * sizeof *x, READS),
   MEMORY(out, sizeof *out, READS | WRITES))
OP(sum_squares, (float *out, Tensor x), (out, x), IN(x), MEMORY(out, sizeof *out, READS | WRITES))
OP(find_not_finite, (int *found, Tensor x, bool negative), (found, x, negative), IN(x),
   MEMORY(found, sizeof *found, READS | WRITES))
OP(accumulate, (Tensor y, Tensor x), (y, x), IN(x), CODES(y, READS | WRITES))
OP(average_weights, (Tensor mean, Tensor w, float share), (mean, w, share), IN(w),
   IN_IF(share != 1, mean), OUT(mean))
OP(adamw, (Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first),
   (w, m, v, grad, a, first), IN(grad), IN(w), IN(m), IN(v), OUT(w), OUT(m), OUT(v))
OP(adamw8bit, (Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first),
   (w, m, v, grad, a, first), IN(grad), IN(w), IN(m), IN(v), OUT(w), OUT(m), OUT(v))
OP(muon_momentum,
   (Tensor u, Tensor m, Tensor grad, float momentum, bool nesterov, float grad_scale),
   (u, m, grad, momentum, nesterov, grad_scale), IN(grad), IN(m), OUT(m), OUT(u))
OP(muon_normalize, (Tensor y, Tensor x, const float *squares, float eps), (y, x, squares, eps),
   IN(x), MEMORY(squares, sizeof *squares, READS), OUT(y))
OP(matmul_scaled, (Tensor y, Tensor x, Tensor w, float alpha, Tensor add, float beta),
   (y, x, w, alpha, add, beta), IN(x), IN(w), IN(add), OUT(y), PRODUCTS(y.rows, y.cols, x.cols, x))
OP(matmul_symmetric, (Tensor y, Tensor x, bool columns, float alpha, Tensor add, float beta),
   (y, x, columns, alpha, add, beta), IN(x), IN(add), OUT(y),
   PRODUCTS(y.rows, symmetric_columns(y), columns ? x.rows : x.cols, x))
OP(muon_apply, (Tensor w, Tensor x, float keep, float rate, uint64_t seed, uint64_t first),
   (w, x, keep, rate, seed, first), IN(w), IN(x), OUT(w))

/* ---- NF4 */
OP(nf4_offset, (float *offset, Tensor w), (offset, w), IN(w),
   MEMORY(offset, sizeof *offset, WRITES))
OP(nf4_quantize, (Nf4Group * to, Tensor w, const float *offset, size_t first, size_t count),
   (to, w, offset, first, count), IN(w), MEMORY(offset, sizeof *offset, READS),
   MEMORY(to, count * sizeof *to, WRITES))
OP(nf4_quantize_plain, (Nf4PlainGroup * to, Tensor w, size_t first, size_t count),
   (to, w, first, count), IN(w), MEMORY(to, count * sizeof *to, WRITES))
OP(nf4_dequantize, (Tensor y, Nf4 x), (y, x),
   GROUPS(x, (size_t)nf4_items(x) * groups_of(x, y.cols)), OUT_AS_SCALED(y),
   MEMORY(y.scale, sizeof(float) * SCALE_FLOATS * (size_t)nf4_items(x), READS))
OP(nf4_amax, (float *amax, Nf4 x, int cols, size_t first, size_t count),
   (amax, x, cols, first, count), GROUPS(x, count), MEMORY(amax, sizeof *amax, READS | WRITES))

/* ---- GPTQ */
OP(gptq_diagonal, (float *diagonal, Tensor h), (diagonal, h), IN(h),
   FLOATS(diagonal, h.rows, 1, WRITES))
OP(gptq_damp, (Tensor m, Tensor h, const int *order, float damping), (m, h, order, damping), IN(h),
   MEMORY(order, (size_t)h.rows * sizeof *order, READS), OUT(m))
OP(gptq_factor, (Tensor c, int *failed, Tensor m, int first), (c, failed, m, first), IN(m), OUT(c),
   MEMORY(failed, sizeof *failed, READS | WRITES))
OP(gptq_columns,
   (int8_t *q, Tensor values, Tensor e, GptqWeights w, Tensor sums, Tensor c, int first, int count),
   (q, values, e, w, sums, c, first, count), IN(w.w),
   FLOATS(w.scale, w.w.rows, w.w.cols / w.group, READS),
   MEMORY(w.order, (size_t)w.w.cols * sizeof(int), READS), IN(sums), IN(c),
   MEMORY(q, tensor_numel(w.w), READS | WRITES), CODES(values, READS | WRITES),
   CODES(e, READS | WRITES))

/* ---- ranks */
OP(wire_encode, (Tensor message, Tensor x, Wire w, WireScale s), (message, x, w, s), IN(x),
   MEMORY(s.scale, sizeof *s.scale, READS), MEMORY(s.cut, sizeof *s.cut, READS | WRITES),
   OUT(message))
OP(wire_sum, (Tensor y, Tensor x, Tensor messages, int ranks, int own, Wire w),
   (y, x, messages, ranks, own, w), IN(x), IN(messages), OUT(y))
OP(comm_all_reduce, (Tensor x, Ranks g), (x, g), IN(x), OUT(x), OVER(g))
OP(comm_all_reduce_max, (Tensor x, Ranks g), (x, g), IN(x), OUT(x), OVER(g))
OP(comm_reduce_scatter, (Tensor part, Tensor whole, Ranks g), (part, whole, g), IN(whole),
   OUT(part), OVER(g))
OP(comm_exchange,
   (Tensor y, const RowRange *received, Tensor x, const RowRange *sent, int items, Ranks g),
   (y, received, x, sent, items, g), IN(x), OUT(y), OVER(g))
OP(comm_send, (Tensor x, Neighbour to), (x, to), IN(x), WITH_NEIGHBOUR(to))
OP(comm_receive, (Tensor x, Neighbour from), (x, from), OUT(x), WITH_NEIGHBOUR(from))
OP(comm_all_gather, (void *whole, const void *part, size_t bytes, Ranks g), (whole, part, bytes, g),
   MEMORY(part, bytes, READS), GATHERED(whole, part, bytes, comm_group_rank(g), comm_group_size(g)),
   OVER(g))

/* ---- copies */
OP(device_put, (void *dst, const void *src, size_t bytes), (dst, src, bytes),
   MEMORY(dst, bytes, WRITES))
OP(device_get, (void *dst, const void *src, size_t bytes), (dst, src, bytes),
   MEMORY(src, bytes, READS))
OP(device_copy, (void *dst, const void *src, size_t bytes), (dst, src, bytes),
   MEMORY(src, bytes, READS), MEMORY(dst, bytes, WRITES))
OP(device_zero, (void *dst, size_t bytes), (dst, bytes), MEMORY(dst, bytes, WRITES))
