/* Checks of the arguments of experts.h's operations, which both back ends make. */
#include "kernels/check_experts.h"

#include "kernels/check.h"

static void check_routing(const char *op, Routing r)
{
    CHECK(r.tokens >= 1 && r.top_k >= 1 && r.top_k <= r.experts,
          "%s: %d tokens, each with %d of %d experts", op, r.tokens, r.top_k, r.experts);
    CHECK(r.expert && r.weight && r.row && r.assignment && r.first,
          "%s: the routing lacks an array", op);
}

static int rows_of(Routing r)
{
    return routing_rows(r.tokens, r.experts, r.top_k);
}

static void check_f32(const char *op, const char *name, Tensor t, int rows, int cols)
{
    check_tensor(op, name, t, rows, cols);
    CHECK(t.format.dtype == F32, "%s: %s is %s; expected f32", op, name, format_name(t.format));
}

static void check_f32_or_bf16(const char *op, const char *name, Tensor t, int rows, int cols)
{
    check_tensor(op, name, t, rows, cols);
    CHECK(!format_has_scales(t.format), "%s: %s is %s; expected f32 or bf16", op, name,
          format_name(t.format));
}

/* Checks an output that may be an operand of GEMMs. */
static void check_operand(const char *op, const char *name, Tensor t, int rows, int cols)
{
    const bool fp8 = format_is_fp8(t.format) && !t.format.group;
    CHECK(fp8 || !format_has_scales(t.format),
          "%s: %s is %s; expected f32, bf16, or FP8 with one scale", op, name,
          format_name(t.format));
    CHECK(!t.channel, "%s: %s has column factors; expected none", op, name);
    check_tensor(op, name, t, rows, cols);
}

/* As check_operand, for an FP8 output whose data or data_t may be absent. */
static void check_recomputed(const char *op, const char *name, Tensor t, int rows, int cols)
{
    if (!t.data)
        t.data = t.data_t;
    check_operand(op, name, t, rows, cols);
}

/* ---- router ---------------------------------------------------------------------------------- */

void check_route(Routing r, Tensor logits)
{
    check_routing("route", r);
    check_f32("route", "logits", logits, r.tokens, r.experts);
}

static void check_groups(const char *op, const char *name, Tensor t, Routing r)
{
    check_f32(op, name, t, t.rows, router_stats_width(r.experts));
    CHECK(t.rows >= 1 && r.tokens % t.rows == 0, "%s: %d tokens in %d groups", op, r.tokens,
          t.rows);
}

void check_router_stats(Tensor stats, Tensor logits, Routing r)
{
    const char *op = "router_stats";
    check_routing(op, r);
    check_f32(op, "logits", logits, r.tokens, r.experts);
    check_groups(op, "stats", stats, r);
}

void check_route_backward(Tensor dlogits, const float *dweight, Tensor logits, Routing r,
                          Tensor counts, float balance)
{
    const char *op = "route_backward";
    check_routing(op, r);
    check_f32(op, "logits", logits, r.tokens, r.experts);
    check_f32_or_bf16(op, "dlogits", dlogits, r.tokens, r.experts);
    CHECK(dweight, "%s: there is no dweight", op);
    CHECK(dlogits.data != logits.data, "%s: dlogits is logits", op);
    CHECK(balance == 0 || counts.data, "%s: the balance loss needs counts, which are absent", op);
    if (counts.data)
        check_groups(op, "counts", counts, r);
}

/* ---- rows ------------------------------------------------------------------------------------ */

void check_experts_gather(Tensor y, Tensor x, Routing r)
{
    const char *op = "experts_gather";
    check_routing(op, r);
    check_f32_or_bf16(op, "x", x, r.tokens, x.cols);
    check_operand(op, "y", y, rows_of(r), x.cols);
}

void check_experts_gather_again(Tensor y, Tensor x, Routing r)
{
    const char *op = "experts_gather_again";
    check_routing(op, r);
    check_f32_or_bf16(op, "x", x, r.tokens, x.cols);
    check_recomputed(op, "y", y, rows_of(r), x.cols);
}

void check_experts_sum(Tensor y, Tensor x, Tensor add, Routing r)
{
    const char *op = "experts_sum";
    check_routing(op, r);
    check_f32_or_bf16(op, "x", x, rows_of(r), x.cols);
    check_f32_or_bf16(op, "y", y, r.tokens, x.cols);
    if (add.data)
        check_f32_or_bf16(op, "add", add, r.tokens, x.cols);
}

/* ---- grouped GEMMs --------------------------------------------------------------------------- */

/* w_rows: number of rows of w or dw, which has the matrices of all experts. */
static void check_matrices(const char *op, int w_rows, Routing r)
{
    check_routing(op, r);
    CHECK(w_rows % r.experts == 0, "%s: the matrices of %d experts have %d rows", op, r.experts,
          w_rows);
}

bool check_experts_matmul(Tensor y, Tensor x, Tensor w, Routing r)
{
    const char *op = "experts_matmul";
    check_matrices(op, w.rows, r);
    check_tensor(op, "x", x, rows_of(r), x.cols);
    check_tensor(op, "w", w, w.rows, x.cols);
    check_tensor(op, "y", y, x.rows, w.rows / r.experts);
    CHECK(!x.channel && !w.channel, "%s: an operand has column factors; expected none", op);
    return check_gemm(op, y, x, w);
}

bool check_experts_matmul_dx(Tensor dx, Tensor dy, Tensor w, Routing r)
{
    const char *op = "experts_matmul_dx";
    CHECK(tensor_exists(w), "%s: there is no w", op);
    check_matrices(op, w.rows, r);
    check_tensor(op, "dy", dy, rows_of(r), w.rows / r.experts);
    check_tensor(op, "dx", dx, dy.rows, w.cols);
    const bool fp8 = check_gemm(op, dx, dy, w);
    if (fp8)
        check_has_transpose(op, "w", w);
    return fp8;
}

bool check_experts_matmul_dw(Tensor dw, Tensor dy, Tensor x, Routing r)
{
    const char *op = "experts_matmul_dw";
    check_matrices(op, dw.rows, r);
    CHECK(tensor_exists(dy) && tensor_exists(x), "%s: there is no %s", op,
          tensor_exists(x) ? "dy" : "x");
    check_f32_or_bf16(op, "dw", dw, r.experts * dy.cols, x.cols);
    CHECK(dy.rows == rows_of(r) && x.rows == dy.rows, "%s: %d rows of dy, %d of x; expected %d", op,
          dy.rows, x.rows, rows_of(r));
    CHECK(!x.channel && !dy.channel, "%s: an operand has column factors; expected none", op);
    const bool fp8 = check_gemm(op, dw, dy, x);
    if (fp8) {
        check_has_transpose(op, "dy", dy);
        check_has_transpose(op, "x", x);
    }
    return fp8;
}

/* ---- adapters -------------------------------------------------------------------------------- */

/* The adapter matrix of one expert, without its position. */
static LoraMatrix check_adapters(const char *op, LoraMatrix m, Tensor wide, Routing r)
{
    check_matrices(op, m.w.rows, r);
    CHECK(wide.rows == rows_of(r), "%s: %d rows; expected %d", op, wide.rows, rows_of(r));
    m.w.rows /= r.experts;
    return m;
}

int check_experts_lora_narrow(Tensor xa, Tensor x, LoraMatrix m, Routing r)
{
    return check_lora_narrow(xa, x, check_adapters("experts_lora_narrow", m, x, r));
}

int check_experts_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Routing r)
{
    return check_lora_widen(y, xa, check_adapters("experts_lora_widen", m, y, r), y);
}

int check_experts_lora_dw(LoraMatrix dm, Tensor xa, Tensor x, Routing r)
{
    return check_lora_dw(check_adapters("experts_lora_dw", dm, x, r), xa, x);
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

static void check_saved(const char *op, Tensor gate_up, int rows, int cols)
{
    check_tensor(op, "gate_up", gate_up, rows, cols);
    CHECK(!format_is_fp8(gate_up.format) || gate_up.format.group,
          "%s: gate_up is %s; expected f32, bf16, or FP8 in groups", op,
          format_name(gate_up.format));
}

void check_experts_swiglu(Tensor act, Tensor gate_up, Tensor wide, Routing r)
{
    const char *op = "experts_swiglu";
    check_routing(op, r);
    check_operand(op, "act", act, rows_of(r), act.cols);
    check_saved(op, gate_up, act.rows, 2 * act.cols);
    check_tensor(op, "wide", wide, act.rows, 2 * act.cols);
    CHECK(gate_up.data != wide.data || format_equal(gate_up.format, wide.format),
          "%s: %s and %s in the same memory", op, format_name(gate_up.format),
          format_name(wide.format));
}

void check_experts_swiglu_backward(Tensor dgate_up, Tensor act, const float *dweight, Tensor dact,
                                   Tensor gate_up, Routing r)
{
    const char *op = "experts_swiglu_backward";
    check_routing(op, r);
    check_tensor(op, "dact", dact, rows_of(r), dact.cols);
    check_saved(op, gate_up, dact.rows, 2 * dact.cols);
    check_operand(op, "dgate_up", dgate_up, dact.rows, 2 * dact.cols);
    if (tensor_exists(act))
        check_recomputed(op, "act", act, dact.rows, dact.cols);
    CHECK(dweight, "%s: there is no dweight", op);
}

void check_router_sum(Tensor sums, Tensor stats, int experts)
{
    CHECK_TENSOR(stats, stats.rows, router_stats_width(experts));
    CHECK_TENSOR(sums, 1, router_stats_width(experts) + 1);
    CHECK_PLAIN(sums);
}
