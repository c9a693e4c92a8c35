/* Execution plans: cuDNN turns a graph of attention into a kernel. That takes 0.3-1.3 s, so plans are kept by key. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attention.h"

struct AttentionPlan {
    AttentionKey key;
    Desc plan;
    int64_t at[ATT_NAMES];      /* of backward's own buffers: bytes from the start of the workspace; else -1 */
    int64_t bytes;              /* of the workspace: cuDNN's, then those buffers */
};

static struct {
    cudnnHandle_t handle;
    AttentionPlan **plan;
    int count;
} cache;

/* ---- cuDNN's backend API ------------------------------------------------------------------------------------- */

static const char *last_message(void)
{
    static char text[1024];
    cudnnGetLastErrorString(text, sizeof text);
    return text;
}

void cudnn_check(cudnnStatus_t status, const char *call)
{
    if (status != CUDNN_STATUS_SUCCESS)
        die("%s: %s: %s", call, cudnnGetErrorString(status), last_message());
}

Desc cudnn_create(cudnnBackendDescriptorType_t type)
{
    Desc d;
    CUDNN_CHECK(cudnnBackendCreateDescriptor(type, &d));
    return d;
}

void cudnn_set(Desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t n, const void *x)
{
    CUDNN_CHECK(cudnnBackendSetAttribute(d, name, type, n, x));
}

void cudnn_set_desc(Desc d, cudnnBackendAttributeName_t name, Desc x)
{
    if (x)
        cudnn_set(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &x);
}

/* ---- plans --------------------------------------------------------------------------------------------------- */

enum { MOST_CONFIGS = 8 };

/* cuDNN's first engine configuration that builds; NULL if none does. */
static Desc build_plan(Desc graph)
{
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    Desc heuristic = cudnn_create(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR), config[MOST_CONFIGS], plan = NULL;
    int64_t count = 0;
    for (int i = 0; i < MOST_CONFIGS; i++)
        config[i] = cudnn_create(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    cudnn_set_desc(heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    cudnn_set(heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (cudnnBackendFinalize(heuristic) == CUDNN_STATUS_SUCCESS)
        CUDNN_CHECK(cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                             MOST_CONFIGS, &count, config));
    for (int64_t i = 0; i < count && i < MOST_CONFIGS && !plan; i++) {
        plan = cudnn_create(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        cudnn_set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &cache.handle);
        cudnn_set_desc(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config[i]);
        if (cudnnBackendFinalize(plan) != CUDNN_STATUS_SUCCESS) {
            cudnnBackendDestroyDescriptor(plan);
            plan = NULL;
        }
    }
    for (int i = 0; i < MOST_CONFIGS; i++)
        cudnnBackendDestroyDescriptor(config[i]);
    cudnnBackendDestroyDescriptor(heuristic);
    return plan;
}

static AttentionPlan *build(AttentionKey key)
{
    AttentionGraph *g = xcalloc(1, sizeof *g);
    AttentionPlan *p = xcalloc(1, sizeof *p);
    p->key = key;
    attention_describe(g, &key);
    Desc graph = cudnn_create(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &cache.handle);
    cudnn_set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->op_count, g->op);
    if (cudnnBackendFinalize(graph) == CUDNN_STATUS_SUCCESS)
        p->plan = build_plan(graph);
    if (!p->plan)
        die("attention %s: cuDNN %zu has no kernel for %lld %s of up to %lld tokens, %lld query and %lld key/value "
            "heads of width %lld, window %lld (0: none), on this %s (%s). cuDNN 9.14 or newer has on an H100 or H200, 9.18 or newer "
            "on other GPUs; %sthe f32 recipe needs none", key.backward ? "backward" : "forward", cudnnGetVersion(),
            (long long)key.B, key.tokens ? "documents" : "sequences", (long long)key.T, (long long)key.H, (long long)key.K,
            (long long)key.D, (long long)key.window, device_name(), last_message(), key.backward && key.tokens ? "for documents none "
            "has on GPUs of compute capability 8.x and 12.x: data.generate_doc_lengths=false does without them; " : "");

    int64_t own = 0;
    CUDNN_CHECK(cudnnBackendGetAttribute(p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, NULL,
                                         &own));
    own = (own + 255) / 256 * 256;
    for (int i = 0; i < ATT_NAMES; i++)
        p->at[i] = g->at[i] < 0 ? -1 : own + g->at[i];
    p->bytes = own + g->bytes;
    cudnnBackendDestroyDescriptor(graph);
    while (g->made_count > 0)
        cudnnBackendDestroyDescriptor(g->made[--g->made_count]);
    free(g);
    return p;
}

static void start_cudnn(void)
{
    size_t version = cudnnGetVersion();
    if (version < 91002)
        die("cuDNN %zu.%zu.%zu computes wrong attention gradients or none; install 9.14 or newer", version / 10000,
            version / 100 % 100, version % 100);
    CUDNN_CHECK(cudnnCreate(&cache.handle));
    CUDNN_CHECK(cudnnSetStream(cache.handle, device_stream()));
}

const AttentionPlan *attention_plan(AttentionKey key)
{
    for (int i = 0; i < cache.count; i++)
        if (memcmp(&cache.plan[i]->key, &key, sizeof key) == 0)
            return cache.plan[i];
    if (!cache.handle)
        start_cudnn();
    cache.plan = xrealloc(cache.plan, sizeof *cache.plan * (size_t)(cache.count + 1));
    return cache.plan[cache.count++] = build(key);
}

void attention_run(const AttentionPlan *plan, void *const memory[ATT_NAMES])
{
    int64_t name[ATT_NAMES];
    void *pointer[ATT_NAMES];
    char *workspace = device_scratch((size_t)plan->bytes + 16, SCRATCH_ATTENTION);
    int64_t n = 0;
    for (int i = 1; i < ATT_NAMES; i++) {
        void *p = plan->at[i] >= 0 ? workspace + plan->at[i] : memory[i];
        if (!p)
            continue;
        name[n] = i;
        pointer[n++] = p;
    }
    Desc pack = cudnn_create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    cudnn_set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, name);
    cudnn_set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, pointer);
    cudnn_set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    CUDNN_CHECK(cudnnBackendFinalize(pack));
    CUDNN_CHECK(cudnnBackendExecute(cache.handle, plan->plan, pack));
    CUDNN_CHECK(cudnnBackendDestroyDescriptor(pack));
}
