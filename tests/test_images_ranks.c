/* Images on several ranks: only the first sequence of a batch has images, so most ranks have none.
 * Steps on 1, 2 and 4 ranks, under every strategy, with context ranks and with pipeline stages,
 * have the losses and gradient norms of ranks that each compute the whole batch. In F32 the results
 * differ only by the order of sums: up to 32 terms of 2 sums, a few u = 2^-24 of each. Three steps
 * of AdamW with eps 1e-5 pass this error on. The bound of 1e-5 is 80 times the error. */
#include "tests/test.h"
#include "tests/images.h"
#include "tests/ranks_case.h"

enum { BATCH = 4, T = 32, STEPS = 3, NUM_WAYS = NUM_STRATEGIES + 2 };
enum { MODULES = 1 << LORA_Q | 1 << LORA_UP | 1 << LORA_DOWN };

typedef struct {
    double loss[STEPS], norm[STEPS];
} Result;

/* Sets *s to the i-th choice: every strategy, then two context ranks, then two stages. Returns
 * false if it needs more ranks. */
static bool use_way(Strategy *s, const char **name, int way)
{
    if (way < NUM_STRATEGIES) {
        *name = strategies[way].name;
        return use_strategy(s, way);
    }
    const bool pipeline = way > NUM_STRATEGIES;
    *name = pipeline ? "pipeline" : "context";
    *s = pipeline ? mesh(2, 1, 1) : mesh(1, 2, 1);
    s->gathering = pipeline ? GATHER_ONCE : GATHER_OFTEN;
    s->grad_sum = pipeline ? SUM_ONCE : SUM_OFTEN;
    return comm_size() > 1;
}

/* The batch of a step. */
static void fill_batch(int *tokens, int *targets, TestImages *images, int step)
{
    for (int n = 0; n < BATCH * T; n++)
        tokens[n] = test_token(11, (uint64_t)(step * BATCH * T + n), 70);
    for (int n = 0; n < BATCH * T; n++)
        targets[n] = n % T == T - 1 ? -1 : tokens[n + 1];
    place_images(images, tokens, targets, 1, T, (uint64_t)step + 20);
}

/* whole: each rank computes all sequences of the batch. With adapters, the projector is trained,
 * too. */
static Result run(const Case *k, Strategy s, bool whole)
{
    Result x;
    Run r;
    ModelConfig m = with_images(architecture(k->model), PROJECTOR_MLP, true);
    m.max_sequence_length = T;
    configure(&r, k, m, s);
    const int data = comm_group_size(RANKS_DATA), share = whole ? BATCH : BATCH / data;
    const int first = whole ? 0 : comm_group_rank(RANKS_DATA) * share, copies = whole ? data : 1;
    r.config.model.lora.projector = k->modules != 0;
    r.config.global_train_batch_size = BATCH * copies;
    place_run(&r);
    for (int step = 0; step < STEPS; step++) {
        int tokens[BATCH * T], targets[BATCH * T];
        TestImages images;
        fill_batch(tokens, targets, &images, step);
        fsdp_empty_grads(&r.store);
        model_zero_losses(&r.model);
        model_use_images(&r.model, (ImageRows){ images.row + first * T, F32 });
        model_micro_batches(&r.model, &r.store, tokens + first * T, targets + first * T, NULL,
                            share, 1.0f / (float)(BATCH * T * copies), 0, PASS_COMPLETE);
        x.loss[step] = model_losses(&r.model).loss / copies;
        comm_sum(&x.loss[step], 1);
        x.norm[step] = optimizer_grad_norm(&r.store);
        optimizer_step(&r.store, &r.config, step + 1, 1e-2, fmin(1, 1 / x.norm[step]));
    }
    close_run(&r);
    return x;
}

/* Trains all parameters, only the projector, LoRA and QLoRA. */
TEST(test_f32)
{
    static const Case cases[] = {
        { "f32", LLAMA },
        { "f32", LLAMA, .trainable = { "multi_modal_projector.*" } },
        { "f32", LLAMA, MODULES },
        { "f32", LLAMA, MODULES, BASE_NF4 },
    };
    for (int i = 0; i < 4; i++) {
        const Result expected = run(&cases[i], mesh(1, 1, 1), true);
        for (int way = 0; way < NUM_WAYS; way++) {
            const char *name;
            Strategy s;
            if (!use_way(&s, &name, way))
                continue;
            const Result found = run(&cases[i], s, false);
            for (int n = 0; n < STEPS; n++)
                if (!(fabs(found.loss[n] - expected.loss[n]) <= 1e-5 * expected.loss[n]) ||
                    !(fabs(found.norm[n] - expected.norm[n]) <= 1e-5 * expected.norm[n]) ||
                    !(expected.norm[n] > 0))
                    fail_msg("case %d, %s, step %d: loss %.8g, norm %.8g; expected %.8g, %.8g", i,
                             name, n + 1, found.loss[n], found.norm[n], expected.loss[n],
                             expected.norm[n]);
        }
    }
}

/* Other recipes give the same bits in a second run, and finite losses, with every choice. */
TEST(test_recipes)
{
    static const char *const names[] = { "coat", "coat-lean", "bf16" };
    for (int way = 0; way < NUM_WAYS; way++) {
        const Case k = { names[way % 3], LLAMA };
        const char *name;
        Strategy s;
        if (!use_way(&s, &name, way))
            continue;
        const Result one = run(&k, s, false), other = run(&k, s, false);
        check_same_bytes(name, &one, &other, sizeof one);
        assert_true(isfinite(one.loss[STEPS - 1]) && isfinite(one.norm[STEPS - 1]));
    }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
