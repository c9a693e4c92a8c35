/* The table of recipes. The FP8 rows follow COAT [arXiv 2410.19313, fig. 1 and sec. 3-4]. The row
 * fp8-lm has the optimizer of FP8-LM [Peng et al. 2023, arXiv 2310.18313, sec. 2.2]: m in E4M3, v
 * and master weights in 16 bits. DIFFERS: in COAT the head is BF16, and scales are per micro-batch
 * (--format.head=bf16 --fp8.scales=microbatch). DIFFERS: FP8-LM's 16-bit formats are FP16, for
 * master weights with a scale per tensor; here they are BF16 with stochastic rounding of weights.
 * In FP8-LM, m has a scale per tensor, here per group of 128. FP8-LM sums gradients in FP8: see
 * fsdp.grad_wire=fp8_lm and grad_wire.h. */
#include "model/shape/recipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Formats as the configuration writes them: f32, bf16, e4m3, e5m2; e4m3/16, e4m3/128 and
 * e4m3/128+. */
#define F32_ { F32, 0, false }
#define BF16_ { BF16, 0, false }
#define E4M3_ { E4M3, 0, false }
#define E5M2_ { E5M2, 0, false }
#define GROUP_ { E4M3, 16, false }
#define PLAIN_ { E4M3, 128, false }
#define MOMENT { E4M3, 128, true }

/* Columns of each recipe: tensors that forward saves for backward; operands of GEMMs; weights,
 * their gradients and moments. */
// clang-format off
const Recipe recipes[] = {
    { .name = "f32",       .residual = F32_,  .saved_norm_input = F32_,   .saved_qkv = F32_,   .saved_attention = F32_,  .saved_mlp = F32_,
      .operand = F32_,  .gradient = F32_,  .head = F32_,  .forward = FROM_SAVED, .fast = FAST_NONE,    .scales = PER_MICROBATCH,
      .keep = KEEP_ALL,    .master = F32_,  .grads = F32_,  .moment1 = F32_,   .moment2 = F32_,   .frozen = F32_ },
    { .name = "bf16",      .residual = BF16_, .saved_norm_input = BF16_,  .saved_qkv = BF16_,  .saved_attention = BF16_, .saved_mlp = BF16_,
      .operand = BF16_, .gradient = BF16_, .head = BF16_, .forward = FROM_SAVED, .fast = FAST_NONE,    .scales = PER_MICROBATCH,
      .keep = KEEP_ALL,    .master = F32_,  .grads = BF16_, .moment1 = F32_,   .moment2 = F32_,   .frozen = BF16_ },
    { .name = "fp8",       .residual = BF16_, .saved_norm_input = BF16_,  .saved_qkv = BF16_,  .saved_attention = BF16_, .saved_mlp = BF16_,
      .operand = E4M3_, .gradient = E5M2_, .head = BF16_, .forward = FROM_SAVED, .fast = FAST_FORWARD, .scales = PER_MICROBATCH,
      .keep = KEEP_ALL,    .master = F32_,  .grads = BF16_, .moment1 = F32_,   .moment2 = F32_,   .frozen = BF16_ },
    { .name = "fp8-lm",    .residual = BF16_, .saved_norm_input = BF16_,  .saved_qkv = BF16_,  .saved_attention = BF16_, .saved_mlp = BF16_,
      .operand = E4M3_, .gradient = E5M2_, .head = BF16_, .forward = FROM_SAVED, .fast = FAST_FORWARD, .scales = PER_MICROBATCH,
      .keep = KEEP_ALL,    .master = BF16_, .grads = BF16_, .moment1 = PLAIN_, .moment2 = BF16_,  .frozen = BF16_ },
    { .name = "coat-act",  .residual = BF16_, .saved_norm_input = GROUP_, .saved_qkv = BF16_,  .saved_attention = BF16_, .saved_mlp = GROUP_,
      .operand = E4M3_, .gradient = E5M2_, .head = E5M2_, .forward = FROM_EXACT, .fast = FAST_ALL,     .scales = PER_STEP,
      .keep = KEEP_INPUTS, .master = F32_,  .grads = BF16_, .moment1 = F32_,   .moment2 = F32_,   .frozen = BF16_ },
    { .name = "coat-opt",  .residual = BF16_, .saved_norm_input = BF16_,  .saved_qkv = BF16_,  .saved_attention = BF16_, .saved_mlp = BF16_,
      .operand = BF16_, .gradient = BF16_, .head = BF16_, .forward = FROM_SAVED, .fast = FAST_NONE,    .scales = PER_MICROBATCH,
      .keep = KEEP_ALL,    .master = BF16_, .grads = BF16_, .moment1 = MOMENT, .moment2 = MOMENT, .frozen = BF16_ },
    { .name = "coat",      .residual = BF16_, .saved_norm_input = GROUP_, .saved_qkv = BF16_,  .saved_attention = BF16_, .saved_mlp = GROUP_,
      .operand = E4M3_, .gradient = E5M2_, .head = E5M2_, .forward = FROM_EXACT, .fast = FAST_ALL,     .scales = PER_STEP,
      .keep = KEEP_INPUTS, .master = BF16_, .grads = BF16_, .moment1 = MOMENT, .moment2 = MOMENT, .frozen = BF16_ },
    { .name = "coat-lean", .residual = BF16_, .saved_norm_input = GROUP_, .saved_qkv = GROUP_, .saved_attention = E4M3_, .saved_mlp = GROUP_,
      .operand = E4M3_, .gradient = E5M2_, .head = E5M2_, .forward = FROM_EXACT, .fast = FAST_ALL,     .scales = PER_STEP,
      .keep = KEEP_INPUTS, .master = BF16_, .grads = BF16_, .moment1 = MOMENT, .moment2 = MOMENT, .frozen = BF16_ },
    { .name = NULL }
};
// clang-format on

const Recipe *recipe_find(const char *name)
{
    for (const Recipe *r = recipes; r->name; r++)
        if (strcmp(r->name, name) == 0)
            return r;
    return NULL;
}

/* Block 0 is the first recomputed block, as in OLMo's should_checkpoint_block. */
Keep recipe_keep(const Recipe *r, int block)
{
    const int n = r->recompute;
    const bool recomputes = n > 0 ? block % n == 0 : n < 0 && block % -n != 0;
    return recomputes ? KEEP_BLOCK : r->keep;
}

bool recipe_recomputes(const Recipe *r)
{
    return keep_recomputes(r->keep) || r->recompute != 0;
}

Format recipe_forward_weights(const Recipe *r)
{
    return format_equal(r->operand, r->residual) ? r->residual : r->master;
}

bool recipe_is_changed(const Recipe *r)
{
    const Recipe *row = recipe_find(r->name);
    if (!row)
        return false;
    const Format own[] = {
        r->residual, r->saved_norm_input, r->saved_qkv, r->saved_attention, r->saved_mlp,
        r->operand,  r->gradient,         r->head,      r->master,          r->grads,
        r->moment1,  r->moment2,          r->frozen
    };
    const Format named[] = {
        row->residual, row->saved_norm_input, row->saved_qkv, row->saved_attention, row->saved_mlp,
        row->operand,  row->gradient,         row->head,      row->master,          row->grads,
        row->moment1,  row->moment2,          row->frozen
    };
    bool same = r->keep == row->keep && r->forward == row->forward && r->fast == row->fast &&
                r->scales == row->scales && r->recompute == row->recompute &&
                r->down_scales == row->down_scales;
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        same &= format_equal(own[i], named[i]);
    return !same;
}

void recipe_print(const Recipe *r)
{
    static const char *const keep[] = { [KEEP_ALL] = "all",
                                        [KEEP_INPUTS] = "inputs",
                                        [KEEP_ATTENTION] = "attention",
                                        [KEEP_BLOCK] = "block" };
    static const char *const fast[] = {
        [FAST_NONE] = "none", [FAST_FORWARD] = "forward", [FAST_ALL] = "all"
    };
    static const char *const forward[] = { [FROM_SAVED] = "saved", [FROM_EXACT] = "exact" };
    static const char *const scales[] = { [PER_MICROBATCH] = "micro-batch", [PER_STEP] = "step" };
    char share[64] = "";
    if (r->recompute)
        snprintf(share, sizeof share, " (only the input in %s %d blocks)",
                 r->recompute > 0 ? "one of" : "all but one of", abs(r->recompute));
    const char *const down =
        r->down_scales == DOWN_CHANNEL ? ", down_proj's input with factors per channel" : "";
    printf("recipe %s: stream %s, saved %s, qkv %s, attention %s, hidden %s, operands %s, "
           "gradients %s, head %s,\n"
           "  keep %s%s, forward from %s, fast accumulation %s, scales per %s%s,\n"
           "  master %s, accumulated gradients %s, frozen weights %s\n",
           r->name, format_name(r->residual), format_name(r->saved_norm_input),
           format_name(r->saved_qkv), format_name(r->saved_attention), format_name(r->saved_mlp),
           format_name(r->operand), format_name(r->gradient), format_name(r->head), keep[r->keep],
           share, forward[r->forward], fast[r->fast], scales[r->scales], down,
           format_name(r->master), format_name(r->grads), format_name(r->frozen));
}
