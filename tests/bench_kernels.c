/* Times every operation at the shapes of a Llama block: bench_kernels [Llama-2-7B | Llama-3-8B].
 *
 * A row shows the median of RUNS runs and the bytes or FLOPs of each. Elementwise operations are
 * compared with a device copy measured in the same run (bytes read + written), GEMMs and attention
 * with the data sheet. All tensors are larger than the L2 cache. On a CPU the shape shrinks to a
 * few tokens, only to show that every operation runs. */
#include "kernels/nf4_map.h"
#include "kernels/wire.h"
#include "tests/bench_attention.h"
#include "tests/bench_experts.h"
#include "tests/bench_lora.h"
#include "tests/bench_tensors.h"

static Model models[] = {
    { "Llama-2-7B", 8, 2048, 4096, 32, 32, 128, 11008, 32000, 8192, 202383360, 32, 8 },
    { "Llama-3-8B", 2, 8192, 4096, 32, 8, 128, 14336, 128256, 2048, 218112000, 32, 8 },
};

/* ---- elementwise ----------------------------------------------------------------------------- */

static void bench_formats(const Model *m)
{
    const int N = m->B * m->T, C = m->C;
    Tensor x = make_normal(BF16_, N, C, 1), y = make(BF16_, N, C), z = make_normal(F32_, N, C, 1);
    Tensor groups = make(E4M3_16, N, C), codes = make(E4M3_, N, C), both = make(E4M3_, N, C);
    const double n = (double)N * C;
    both.data_t = hold((size_t)N * (size_t)C);
    TIME_BYTES("device copy", 4 * n, device_copy(y.data, x.data, tensor_bytes(x)));
    TIME_BYTES("quantize f32 -> bf16", 6 * n, quantize(y, z));
    TIME_BYTES("quantize bf16 -> f32", 6 * n, quantize(z, x));
    TIME_BYTES("quantize bf16 -> e4m3/16", 3.0625 * n, quantize(groups, x));
    TIME_BYTES("quantize e4m3/16 -> bf16", 3.0625 * n, quantize(y, groups));
    TIME_BYTES("quantize bf16 -> e4m3", 5 * n, quantize(codes, x));
    TIME_BYTES("quantize bf16 -> e4m3 and transposed", 6 * n, quantize(both, x));
    TIME_BYTES("sum_squares bf16", 2 * n, sum_squares(z.data, x));
    in_step(ELEMENTWISE, all_params(m) / n);
    TIME_BYTES("sum_squares f32", 4 * n, sum_squares(y.data, z));
    release();
}

static void bench_norm(const Model *m)
{
    const int N = m->B * m->T, C = m->C;
    const double n = (double)N * C;
    const Norm rms = { RMS_NORM, 1e-5f }, layer = { LAYER_NORM, 1e-5f };
    Tensor x = make_normal(BF16_, N, C, 1), y = make(BF16_, N, C), dx = make_normal(BF16_, N, C, 1);
    Tensor w = make_normal(BF16_, 1, C, 1), dw = make(BF16_, 1, C), stats = make(F32_, N, 2),
           amax = make(F32_, 1, 1);
    TIME_BYTES("norm_forward", 4 * n, norm_forward(y, x, stats.data, x, w, NONE, rms, FROM_SAVED));
    in_step(ELEMENTWISE, m->micro_batches);
    TIME_BYTES("norm_forward, residual", 6 * n,
               norm_forward(y, x, stats.data, x, w, dx, rms, FROM_SAVED));
    TIME_BYTES("norm_backward, dx +=", 8 * n,
               norm_backward(dx, NULL, dw, y, x, stats.data, w, rms, true));
    TIME_BYTES("norm_backward", 6 * n,
               norm_backward(dx, NULL, dw, y, x, stats.data, w, rms, false));
    TIME_BYTES("norm_backward, maximum of dx", 6 * n,
               norm_backward(dx, amax.data, dw, y, x, stats.data, w, rms, false));
    in_step(ELEMENTWISE, m->micro_batches);
    TIME_BYTES("norm_forward, LayerNorm, no weight", 4 * n,
               norm_forward(y, x, stats.data, x, NONE, NONE, layer, FROM_SAVED));
    TIME_BYTES("norm_backward, LayerNorm, no weight, dx +=", 8 * n,
               norm_backward(dx, NULL, NONE, y, x, stats.data, NONE, layer, true));
    release();
}

static void bench_rope(const Model *m)
{
    const int N = m->B * m->T, S = (m->H + 2 * m->K) * m->D, q = m->H * m->D, k = m->K * m->D;
    const double n = (double)N * S, turned = (double)N * (q + k);
    Attention a = attention_of(m), clipped = a;
    clipped.clip = 8;
    Tensor x = make_normal(BF16_, N, S, 1), y = make_normal(BF16_, N, S, 1),
           stats = make(F32_, N, 2);
    Tensor qw = make_normal(BF16_, 1, q, 1), kw = make_normal(BF16_, 1, k, 1);
    Tensor dqw = make(F32_, 1, q), dkw = make(F32_, 1, k);
    TIME_BYTES("rope_forward in place", 4 * turned,
               rope_forward(y, y, NULL, y, NO_PRODUCT, NONE, NONE, a, FROM_SAVED));
    in_step(ELEMENTWISE, blocks(m));
    TIME_BYTES("rope_backward in place", 4 * turned,
               rope_backward(y, NONE, NONE, y, x, NULL, NONE, NONE, a));
    TIME_BYTES("rope_forward, clip", 4 * n,
               rope_forward(y, x, NULL, x, NO_PRODUCT, NONE, NONE, clipped, FROM_SAVED));
    TIME_BYTES("rope_backward, clip", 6 * n,
               rope_backward(y, NONE, NONE, y, x, NULL, NONE, NONE, clipped));
    TIME_BYTES("rope_forward, QK-norm", 4 * n,
               rope_forward(y, x, stats.data, x, NO_PRODUCT, qw, kw, a, FROM_SAVED));
    TIME_BYTES("rope_backward, QK-norm", 6 * turned,
               rope_backward(y, dqw, dkw, y, x, stats.data, qw, kw, a));
    release();
}

/* With four query heads per key/value head, as in Qwen3-8B; other sizes as in the models above. */
static void bench_rope_by_head(const Model *m)
{
    Model qwen = *m;
    qwen.K = m->H / 4;
    const int N = m->B * m->T, H = m->H, K = qwen.K, D = m->D, S = (H + 2 * K) * D;
    const double n = (double)N * S, turned = (double)N * (H + K) * D;
    const Attention a = attention_of(&qwen);
    Tensor x = make_normal(BF16_, N, S, 1), y = make_normal(BF16_, N, S, 1), dx = make(BF16_, N, S);
    Tensor qw = make_normal(BF16_, 1, D, 1), kw = make_normal(BF16_, 1, D, 1),
           stats = make(F32_, N, H + K);
    Tensor dqw = make(F32_, 1, D), dkw = make(F32_, 1, D);
    TIME_BYTES("rope_forward, QK-norm by head", 4 * n,
               rope_forward(y, x, stats.data, x, NO_PRODUCT, qw, kw, a, FROM_SAVED));
    TIME_BYTES("rope_forward, QK-norm by head, in place", 4 * turned,
               rope_forward(y, y, stats.data, y, NO_PRODUCT, qw, kw, a, FROM_SAVED));
    TIME_BYTES("rope_backward, QK-norm by head, in place", 6 * turned,
               rope_backward(y, dqw, dkw, y, x, stats.data, qw, kw, a));
    TIME_BYTES("rope_backward, QK-norm by head", 2 * turned + 4 * n,
               rope_backward(dx, dqw, dkw, y, x, stats.data, qw, kw, a));
    release();
}

static void bench_swiglu(const Model *m)
{
    const int N = m->B * m->T;
    const double n = (double)N * m->F;
    Tensor wide = make_normal(BF16_, N, 2 * m->F, 1), dwide = make(BF16_, N, 2 * m->F);
    Tensor act = make(BF16_, N, m->F), dact = make_normal(BF16_, N, m->F, 1);
    TIME_BYTES("swiglu_forward", 6 * n, swiglu_forward(act, wide, wide, NO_PRODUCT, FROM_SAVED));
    TIME_BYTES("swiglu_backward", 10 * n, swiglu_backward(dwide, NONE, dact, NO_PRODUCT, wide));
    TIME_BYTES("swiglu_backward, act again", 12 * n,
               swiglu_backward(dwide, act, dact, NO_PRODUCT, wide));
    release();
}

/* COAT's data flow of one block: saved tensors and GEMM operands, forward and backward. */
static void bench_coat(const Model *m)
{
    const int N = m->B * m->T, C = m->C, F = m->F, S = (m->H + 2 * m->K) * m->D;
    const double n = (double)N * C, f = (double)N * F, s = (double)N * S;
    const Norm rms = { RMS_NORM, 1e-5f };
    Tensor res = make_normal(BF16_, N, C, 1), dh = make_normal(BF16_, N, C, 1),
           stats = make(F32_, N, 2);
    Tensor w = make_normal(BF16_, 1, C, 1), dw = make(BF16_, 1, C), x = make(E4M3_16, N, C);
    Tensor h = make_operand(E4M3_, N, C);
    Tensor h_rows = rows_only(h), h_transposed = transpose_only(h), dy = make_operand(E5M2_, N, C),
           amax = make(F32_, 1, 1);
    TIME_BYTES("coat: norm_forward, x and h", (2 + 1.0625 + 2 + 1) * n,
               norm_forward(h_rows, x, stats.data, res, w, NONE, rms, FROM_EXACT));
    in_step(ELEMENTWISE, 2 * blocks(m));
    TIME_BYTES("coat: norm_recompute, h transposed", (1.0625 + 1) * n,
               norm_recompute(h_transposed, x, stats.data, w));
    in_step(ELEMENTWISE, 2 * blocks(m));
    TIME_BYTES("coat: norm_backward, dx +=, its maximum", (2 + 1.0625 + 4) * n,
               norm_backward(res, amax.data, dw, dh, x, stats.data, w, rms, true));
    in_step(ELEMENTWISE, 2 * blocks(m));
    TIME_BYTES("coat: dx to dy, transposed too", (2 + 2) * n,
               quantize_with_amax(dy, res, amax.data));
    in_step(ELEMENTWISE, 2 * blocks(m));
    TIME_BYTES("coat: quantize attention output", (2 + 2 + 1) * n, quantize(h_rows, dh));
    in_step(ELEMENTWISE, blocks(m));
    TIME_BYTES("coat: the same, transposed", (2 + 1) * n, quantize_codes(h_transposed, dh));
    in_step(ELEMENTWISE, blocks(m));
    TIME_BYTES("coat-lean: attention output expanded, transposed too", (1 + 2 + 1) * n,
               expand_operand(dh, h));
    release();
    Tensor wide = make_normal(BF16_, N, 2 * F, 1), gate_up = make(E4M3_16, N, 2 * F),
           act = make_operand(E4M3_, N, F);
    Tensor act_rows = rows_only(act), act_transposed = transpose_only(act),
           dact = make_normal(BF16_, N, F, 1);
    Tensor dwide = make_operand(E5M2_, N, 2 * F);
    TIME_BYTES("coat: swiglu_forward, gate_up and act", (4 + 2.125 + 4 + 1) * f,
               swiglu_forward(act_rows, gate_up, wide, NO_PRODUCT, FROM_EXACT));
    in_step(ELEMENTWISE, blocks(m));
    TIME_BYTES("coat: swiglu_backward, act transposed", (4.125 + 4.125 + 5) * f,
               swiglu_backward(dwide, act_transposed, dact, NO_PRODUCT, gate_up));
    in_step(ELEMENTWISE, blocks(m));
    release();
    Attention a = attention_of(m);
    Tensor qkv = make_normal(BF16_, N, S, 1), dqkv = make_operand(E5M2_, N, S),
           saved = make(E4M3_16, N, S);
    TIME_BYTES("coat: rope_backward", (2 + 2 + 2) * s,
               rope_backward(dqkv, NONE, NONE, qkv, qkv, NULL, NONE, NONE, a));
    in_step(ELEMENTWISE, blocks(m));
    TIME_BYTES("coat-lean: rope_forward, qkv saved", 5.0625 * s,
               rope_forward(qkv, saved, NULL, qkv, NO_PRODUCT, NONE, NONE, a, FROM_EXACT));
    TIME_BYTES("coat-lean: rope_forward from it", 3.0625 * s,
               rope_forward(qkv, saved, NULL, saved, NO_PRODUCT, NONE, NONE, a, FROM_SAVED));
    release();
}

/* COAT's operations that need a maximum, as in later micro-batches of a step with
 * fp8.scales=step. */
static void bench_ranges(const Model *m)
{
    const int N = m->B * m->T, C = m->C, F = m->F, S = (m->H + 2 * m->K) * m->D;
    const double n = (double)N * C, f = (double)N * F, s = (double)N * S;
    const Norm rms = { RMS_NORM, 1e-5f };
    Tensor res = make_normal(BF16_, N, C, 1), stats = make(F32_, N, 2),
           w = make_normal(BF16_, 1, C, 1);
    Tensor x = make(E4M3_16, N, C), h = with_range(make(E4M3_, N, C));
    TIME_IN_RANGE("in range: norm_forward, x and h", (2 + 1.0625 + 1) * n,
                  norm_forward(h, x, stats.data, res, w, NONE, rms, FROM_EXACT));
    TIME_IN_RANGE("in range: quantize attention output", (2 + 1) * n, quantize(h, res));
    release();
    Tensor wide = make_normal(BF16_, N, 2 * F, 1), gate_up = make(E4M3_16, N, 2 * F),
           dact = make_normal(BF16_, N, F, 1);
    Tensor act = with_range(make_operand(E4M3_, N, F)),
           dwide = with_range(make_operand(E5M2_, N, 2 * F));
    Tensor act_rows = rows_only(act), act_transposed = transpose_only(act);
    TIME_IN_RANGE("in range: swiglu_forward, gate_up and act", (4 + 2.125 + 1) * f,
                  swiglu_forward(act_rows, gate_up, wide, NO_PRODUCT, FROM_EXACT));
    TIME_IN_RANGE("in range: swiglu_backward, act transposed", (4.125 + 5) * f,
                  swiglu_backward(dwide, act_transposed, dact, NO_PRODUCT, gate_up));
    release();
    Attention a = attention_of(m);
    Tensor qkv = make_normal(BF16_, N, S, 1), dqkv = with_range(make_operand(E5M2_, N, S));
    TIME_IN_RANGE("in range: rope_backward", (2 + 2) * s,
                  rope_backward(dqkv, NONE, NONE, qkv, qkv, NULL, NONE, NONE, a));
    release();
}

static void bench_adamw_fp8(const Model *m)
{
    const int n = (int)m->params / 256 * 256;
    const Format moment = { E4M3, 128, true };
    AdamW a = { .lr = 1e-3f,
                .beta1 = 0.9f,
                .beta2 = 0.95f,
                .eps = 1e-8f,
                .correction1 = 0.1f,
                .correction2 = 0.05f,
                .grad_scale = 1 };
    Tensor w = make_normal(BF16_, 1, n, 1), g = make_normal(BF16_, 1, n, 1);
    Tensor mm = make(moment, 1, n), v = make(moment, 1, n);
    adamw(w, mm, v, g, a, 0);
    TIME_BYTES("coat: adamw, expanded FP8 moments", 10.125 * n, adamw(w, mm, v, g, a, 0));
    in_step(OPTIMIZER, all_params(m) / n);
    mm.format = format_of_moment((Format){ E4M3, 128, false });
    Tensor wide = make(BF16_, 1, n);
    init_constant(wide, 1e-4f);
    TIME_BYTES("adamw, FP8 and BF16 moments", (8 + 4 + 4.0 / 128) * n, adamw(w, mm, wide, g, a, 0));
    release();
}

static void bench_adamw8bit(const Model *m)
{
    const int n = (int)m->params / 256 * 256;
    AdamW a = { .lr = 1e-3f,
                .beta1 = 0.9f,
                .beta2 = 0.95f,
                .eps = 1e-8f,
                .correction1 = 0.1f,
                .correction2 = 0.05f,
                .grad_scale = 1 };
    Tensor w = make_normal(BF16_, 1, n, 1), g = make_normal(BF16_, 1, n, 1);
    Tensor mm = make((Format){ DYNAMIC8, DYNAMIC8_GROUP }, 1, n),
           v = make((Format){ UDYNAMIC8, DYNAMIC8_GROUP }, 1, n);
    adamw8bit(w, mm, v, g, a, 0);
    TIME_BYTES("adamw8bit", (6 + 4 + 16.0 / 256) * n, adamw8bit(w, mm, v, g, a, 0));
    release();
}

static void bench_weights(const Model *m)
{
    Tensor w = make_normal(BF16_, 2 * m->F, m->C, 1), w8 = make_operand(E4M3_, 2 * m->F, m->C);
    const double n = (double)tensor_numel(w);
    Tensor rows = rows_only(w8), turned = transpose_only(w8);
    TIME_BYTES("coat: scale of weights", 2 * n, quantize_scale(w8, w));
    in_step(ELEMENTWISE, block_params(m) / n);
    TIME_BYTES("coat: weights to FP8", 3 * n, quantize_codes(rows, w));
    in_step(ELEMENTWISE, blocks(m) * m->params / n);
    TIME_BYTES("coat: weights to FP8, transposed", 3 * n, quantize_codes(turned, w));
    in_step(ELEMENTWISE, blocks(m) * m->params / n);
    release();
}

/* A block's gradients as two ranks exchange them: each sends one half and adds the other. */
static void bench_wire(const Model *m)
{
    static const struct {
        const char *encode, *sum;
        Wire wire;
    } rows[] = { { "wire_encode bf16 -> fp8", "wire_sum fp8", WIRE_FP8 },
                 { "wire_encode bf16 -> int8", "wire_sum int8", WIRE_INT8 },
                 { "wire_encode bf16 -> bf16", "wire_sum bf16", WIRE_BF16 } };
    const int records = (int)(m->params / 2 / WIRE_VALUES);
    Tensor x = make_normal(BF16_, records, WIRE_VALUES, 1e-3f);
    for (int i = 0; i < 3; i++) {
        const Wire w = rows[i].wire;
        const double bytes = (double)records * (double)wire_record_bytes(w),
                     own = 2.0 * tensor_numel(x);
        Tensor message = wire_message(hold((size_t)bytes), (size_t)records, w);
        TIME_BYTES(rows[i].encode, own + bytes, wire_encode(message, x, w, (WireScale){ 0 }));
        TIME_BYTES(rows[i].sum, 2 * own + bytes, wire_sum(x, x, message, 2, 1, w));
    }
    release();
}

/* A frozen matrix in NF4, converted to an operand before every use. */
static void bench_nf4(const Model *m)
{
    const int rows = 2 * m->F;
    const double n = (double)rows * m->C, stored = (double)sizeof(Nf4Group) / NF4_GROUP;
    const size_t groups = nf4_groups((size_t)m->F, (size_t)m->C);
    Tensor w = make_normal(BF16_, m->F, m->C, 0.02f), y = make(BF16_, rows, m->C),
           y8 = make_operand(E4M3_, rows, m->C);
    Tensor offset = make(F32_, 1, 1), amax = make(F32_, 1, 1);
    Nf4Group *g = hold(2 * groups * sizeof *g);
    const Nf4 x = { .group = g, .num_tensors = 2, .rows = { m->F, m->F } };
    nf4_offset(offset.data, w);
    TIME_BYTES("nf4_quantize bf16", (2 + stored) * n / 2,
               nf4_quantize(g, w, offset.data, 0, groups));
    nf4_quantize(g + groups, w, offset.data, 0, groups);
    nf4_amax(amax.data, x, m->C, 0, 2 * groups);
    quantize_scale_from(y8, amax.data);
    Tensor only_rows = rows_only(y8), turned = transpose_only(y8);
    TIME_BYTES("nf4_dequantize to bf16", (stored + 2) * n, nf4_dequantize(y, x));
    TIME_BYTES("nf4_dequantize to e4m3", (stored + 1) * n, nf4_dequantize(only_rows, x));
    TIME_BYTES("nf4_dequantize to e4m3, transposed", (stored + 1) * n, nf4_dequantize(turned, x));
    release();
}

/* Rows of w and dw count once, however often their tokens occur. */
static void bench_embedding(const Model *m)
{
    const int N = m->B * m->T;
    const double row = m->C, n = (double)N * row;
    int *token = malloc(sizeof *token * (size_t)N), distinct = 0;
    char *seen = calloc((size_t)m->V, 1);
    /* as uneven as words: half of the tokens come from an eighth of the table */
    for (int i = 0; i < N; i++) {
        double u = (double)(random_bits(1, (uint64_t)i) >> 11) * 0x1p-53;
        token[i] = (int)(m->V * u * u * u);
        distinct += !seen[token[i]];
        seen[token[i]] = 1;
    }
    TokenAt *by_token = malloc(sizeof *by_token * (size_t)N),
            *sorted = hold(sizeof *sorted * (size_t)N);
    sort_tokens(by_token, token, N, m->V);
    device_put(sorted, by_token, sizeof *sorted * (size_t)N);
    free(token);
    free(by_token);
    free(seen);
    Tensor w = make_normal(BF16_, m->V, m->C, 1), y = make(BF16_, N, m->C),
           dw = make(BF16_, m->V, m->C);
    TIME_BYTES("embedding_forward", 2 * n + 2 * distinct * row, embedding_forward(y, sorted, w));
    in_step(ELEMENTWISE, m->micro_batches);
    TIME_BYTES("embedding_backward", 2 * n + 4 * distinct * row, embedding_backward(dw, sorted, y));
    in_step(ELEMENTWISE, m->micro_batches);
    release();
}

/* Each run reads the results of the previous run, so the last runs compute gradients of gradients.
 * The time does not depend on the values. */
static void bench_loss(const Model *m)
{
    const double n = (double)m->chunk * m->V;
    int *target = malloc(sizeof *target * (size_t)m->chunk),
        *targets = hold(sizeof *target * (size_t)m->chunk);
    for (int i = 0; i < m->chunk; i++)
        target[i] = (int)(random_bits(2, (uint64_t)i) % (uint64_t)m->V);
    device_put(targets, target, sizeof *target * (size_t)m->chunk);
    free(target);
    Tensor logits = make_normal(BF16_, m->chunk, m->V, 1), losses = make(F32_, 2, m->chunk);
    float *loss = losses.data;
    TIME_BYTES(
        "cross_entropy, loss only", 2 * n,
        cross_entropy(logits, loss, loss + m->chunk, targets, NULL, m->V, 1, 1, 1e-4f, false));
    Tensor codes = make_operand(E5M2_, m->chunk, m->V), code_rows = rows_only(codes),
           columns = transpose_only(codes);
    TIME_BYTES("cross_entropy_codes", 3 * n,
               cross_entropy_codes(code_rows, 1.25f, logits, loss, loss + m->chunk, targets, NULL,
                                   m->V, 1, 1, 1e-4f));
    TIME_BYTES("transpose of its codes", 2 * n, quantize_codes(columns, code_rows));
    TIME_BYTES(
        "cross_entropy", 4 * n,
        cross_entropy(logits, loss, loss + m->chunk, targets, NULL, m->V, 1, 1, 1e-4f, true));
    in_step(ELEMENTWISE, chunks(m));
    release();
}

static void bench_adamw(const Model *m)
{
    const int n = (int)m->params;
    const AdamW a = { .lr = 1e-4f,
                      .beta1 = 0.9f,
                      .beta2 = 0.95f,
                      .eps = 1e-8f,
                      .weight_decay = 0.1f,
                      .correction1 = 0.1f,
                      .correction2 = 0.05f,
                      .grad_scale = 1,
                      .seed = 1 };
    Tensor grad = make_normal(BF16_, 1, n, 1e-3f), w = make_normal(BF16_, 1, n, 0.02f),
           mean = make(BF16_, 1, n);
    Tensor square = make(BF16_, 1, n), w32 = make_normal(F32_, 1, n, 0.02f),
           mean32 = make(F32_, 1, n);
    Tensor square32 = make(F32_, 1, n);
    TIME_BYTES("adamw, bf16 weights and moments", 14.0 * n, adamw(w, mean, square, grad, a, 0));
    TIME_BYTES("adamw, bf16 weights, f32 moments", 22.0 * n,
               adamw(w, mean32, square32, grad, a, 0));
    TIME_BYTES("adamw, f32 weights and moments", 26.0 * n,
               adamw(w32, mean32, square32, grad, a, 0));
    release();
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */

/* The operands are quantized normal numbers. All GEMMs use fast accumulation, as in COAT's recipes.
 * adds: the forward GEMM adds the residual stream. times: how often a step of coat runs each
 * GEMM. */
static void bench_linear_fp8(const char *name, int N, int O, int C, bool adds, double times)
{
    char label[64];
    const double flops = 2.0 * N * O * C;
    const int most = N > O ? N : O, least = N > O ? O : N;
    Tensor source = make_normal(BF16_, most, C > least ? C : least, 1),
           add = adds ? make_normal(BF16_, N, O, 1) : NONE;
    Tensor x = make_operand(E4M3_, N, C), w = make_operand(E4M3_, O, C),
           dy = make_operand(E5M2_, N, O);
    Tensor y = make(BF16_, N, O), dx = make(BF16_, N, C), dw = make(BF16_, O, C);
    source.rows = N, source.cols = C, quantize(x, source);
    source.rows = O, source.cols = C, quantize(w, source);
    source.rows = N, source.cols = O, quantize(dy, source);
    x.fast = dy.fast = true;
    snprintf(label, sizeof label, "matmul    FP8 %s (%d,%d)", name, O, C);
    TIME_FLOPS(label, flops, matmul(y, x, w, add));
    in_step(GEMMS, times);
    snprintf(label, sizeof label, "matmul_dx FP8 %s (%d,%d)", name, O, C);
    TIME_FLOPS(label, flops, matmul_dx(dx, dy, w, false));
    in_step(GEMMS, times);
    snprintf(label, sizeof label, "matmul_dw FP8 %s (%d,%d)", name, O, C);
    TIME_FLOPS(label, flops, matmul_dw(dw, dy, x));
    in_step(GEMMS, times);
    release();
}

/* Times the column factors of an FP8 operand. */
static float *ones(int columns)
{
    const Tensor t = make(F32_, 1, columns);
    init_constant(t, 1);
    return t.data;
}

/* The same for gate and up with SwiGLU; the results stay within the range of the scale of act. */
static void bench_matmul_swiglu(const Model *m)
{
    const int N = m->B * m->T, C = m->C, F = m->F;
    Tensor source = make_normal(BF16_, N > 2 * F ? N : 2 * F, C, 1), x = make(E4M3_, N, C),
           w = make(E4M3_, 2 * F, C);
    Tensor wide = make(BF16_, N, 2 * F), gate_up = make(E4M3_16, N, 2 * F),
           act = with_range(make(E4M3_, N, F));
    source.rows = N, quantize(x, source);
    source.rows = 2 * F, quantize(w, source);
    x.fast = true;
    matmul_swiglu(act, gate_up, wide, x, w);
    scales_reused = true;
    TIME_FLOPS("in range: matmul_swiglu FP8", 4.0 * N * F * C,
               matmul_swiglu(act, gate_up, wide, x, w));
    act.channel = ones(F);
    TIME_FLOPS("in range: matmul_swiglu FP8, factors", 4.0 * N * F * C,
               matmul_swiglu(act, gate_up, wide, x, w));
    scales_reused = false;
    release();
}

/* The gradient of the last layer's input with SwiGLU's backward; the results stay within the range
 * of the reused scale. */
static void bench_matmul_dx_swiglu(const Model *m)
{
    const int N = m->B * m->T, C = m->C, F = m->F;
    Tensor source = make_normal(BF16_, N > C ? N : C, 2 * F, 1), dy = make(E5M2_, N, C),
           w = make_operand(E4M3_, C, F);
    Tensor dact = make(BF16_, N, F), gate_up = make(E4M3_16, N, 2 * F),
           act = make_operand(E4M3_, N, F);
    Tensor dgate_up = with_range(make_operand(E5M2_, N, 2 * F)), folded = make(E4M3_, C, F);
    source.rows = N, quantize(gate_up, source);
    source.cols = C, quantize(dy, source);
    source.rows = C, source.cols = F, quantize(w, source);
    source.rows = N, quantize(act, source);
    act.data = NULL;
    dy.fast = true;
    matmul_dx_swiglu(dgate_up, act, dact, dy, w, gate_up);
    scales_reused = true;
    TIME_FLOPS("in range: matmul_dx_swiglu FP8", 2.0 * N * F * C,
               matmul_dx_swiglu(dgate_up, act, dact, dy, w, gate_up));
    act.channel = ones(F);
    TIME_FLOPS("in range: matmul_dx_swiglu FP8, factors", 2.0 * N * F * C,
               matmul_dx_swiglu(dgate_up, act, dact, dy, w, gate_up));
    scales_reused = false;
    TIME_BYTES("fold_channels", 2.0 * C * F, fold_channels(folded, rows_only(w), act.channel));
    release();
}

static void bench_linear(const char *name, int N, int O, int C, double times)
{
    char label[64];
    const double flops = 2.0 * N * O * C;
    Tensor x = make_normal(BF16_, N, C, 1), w = make_normal(BF16_, O, C, 0.02f),
           y = make_normal(BF16_, N, O, 1);
    Tensor dx = make(BF16_, N, C), dw = make(BF16_, O, C);
    snprintf(label, sizeof label, "matmul    %s (%d,%d)", name, O, C);
    TIME_FLOPS(label, flops, matmul(y, x, w, NONE));
    in_step(GEMMS, times);
    snprintf(label, sizeof label, "matmul_dx %s (%d,%d)", name, O, C);
    TIME_FLOPS(label, flops, matmul_dx(dx, y, w, false));
    in_step(GEMMS, times);
    snprintf(label, sizeof label, "matmul_dw %s (%d,%d)", name, O, C);
    TIME_FLOPS(label, flops, matmul_dw(dw, y, x));
    in_step(GEMMS, times);
    release();
}

/* Shapes that take one core a second or two. */
static void shrink(Model *m)
{
    *m = (Model){ m->name, 1, 16, 128, 4, 4 / (m->H / m->K), 32, 352, 1024, 16, 100000, 2, 1 };
}

static Model *choose(int argc, char **argv)
{
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        if (argc == 1 || (argc == 2 && strcmp(argv[1], models[i].name) == 0))
            return &models[i];
    fprintf(stderr, "usage: bench_kernels [Llama-2-7B | Llama-3-8B]\n");
    exit(2);
}

int main(int argc, char **argv)
{
    Model *m = choose(argc, argv);
    device_init(0);
    if (strcmp(device_name(), "cpu") == 0) {
        shrink(m);
        shrink(&sliding);
    }
    printf("%s on %s: %d x %d tokens, C %d, H %d, K %d, F %d, V %d\n"
           "median of %d runs; %% of the device copy or of the data sheet\n",
           m->name, device_name(), m->B, m->T, m->C, m->H, m->K, m->F, m->V, RUNS);
    bench_formats(m);
    bench_norm(m);
    bench_rope(m);
    bench_rope_by_head(m);
    bench_swiglu(m);
    bench_coat(m);
    bench_ranges(m);
    bench_adamw_fp8(m);
    bench_adamw8bit(m);
    bench_weights(m);
    bench_wire(m);
    bench_nf4(m);
    bench_embedding(m);
    bench_loss(m);
    bench_adamw(m);
    const int N = m->B * m->T, q = m->H * m->D, S = (m->H + 2 * m->K) * m->D;
    bench_linear("qkv", N, S, m->C, 0);
    bench_linear("out", N, m->C, q, 0);
    bench_linear("gate_up", N, 2 * m->F, m->C, 0);
    bench_linear("down", N, m->C, m->F, 0);
    bench_linear("head", m->chunk, m->V, m->C, chunks(m));
    bench_matmul_swiglu(m);
    bench_matmul_dx_swiglu(m);
    bench_linear_fp8("qkv", N, S, m->C, false, blocks(m));
    bench_linear_fp8("out", N, m->C, q, true, blocks(m));
    bench_linear_fp8("gate_up", N, 2 * m->F, m->C, false, blocks(m));
    bench_linear_fp8("down", N, m->C, m->F, true, blocks(m));
    bench_linear_fp8("head", m->chunk, m->V, m->C, false, 0);
    bench_lora(m);
    bench_experts(strcmp(device_name(), "cpu") == 0);
    bench_attention(m, 0, blocks(m));
    bench_attention(&sliding, sliding.T, 0);
    bench_attention(&sliding, sliding.T / 2, 0);
    bench_documents(m, m->B * m->T >= 4096 ? m->B * m->T / 4096 : 1,
                    m->B * m->T >= 4096 ? 4096 : m->T);
    bench_decoding(m);
    print_step("coat with scales of the micro-batch and a BF16 head", m->micro_batches * N);
    return 0;
}
