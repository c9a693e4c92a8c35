/* Records when each kernel, copy and fill of a program ran on its GPU; scripts/in_step.py makes
 * tables of the records. The program needs no change: CUDA loads this library into it [CUPTI,
 * "Injection"].
 *
 *     make BACKEND=cuda build/cuda/kernel_times.so
 *     CUDA_INJECTION64_PATH=$PWD/build/cuda/kernel_times.so KERNEL_TIMES=FOLDER ./train ...
 *
 * Each process writes FOLDER/PID.tsv; FOLDER must exist. Columns: start and end in ns, stream,
 * name. If the program dies, a part of its last second is missing. After an error, this library
 * prints a message, and the program continues without records. */
#define _GNU_SOURCE
#include <cupti.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* BUFFER: bytes of one CUPTI buffer. It holds about 2,000 records, at most one second of training.
 * ALIGNMENT: alignment of the buffer in bytes; CUPTI requires 8. */
enum { BUFFER = 1 << 19, ALIGNMENT = 64 };

/* Guards `out` and `dropped`. CUPTI delivers buffers from its own thread and from the thread that
 * flushes, and may hold its own lock meanwhile. So do not call a CUPTI function while this mutex is
 * locked. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static FILE *out; /* NULL: records that arrive later are dropped */
static size_t dropped;
static pid_t owner; /* process that opened `out`; a forked child must not write the same records */

static int works(CUptiResult status, const char *call)
{
    const char *text = "unknown error";
    if (status == CUPTI_SUCCESS)
        return 1;
    cuptiGetResultString(status, &text);
    fprintf(stderr, "kernel_times: %s: %s; no kernel's times will be written\n", call, text);
    return 0;
}

static const char *copy_name(unsigned kind)
{
    switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD: return "[copy host to device]";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH: return "[copy device to host]";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD: return "[copy device to device]";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP: return "[copy peer to peer]";
    default: return "[copy]";
    }
}

static void write_record(uint64_t start, uint64_t end, uint32_t stream, const char *name)
{
    pthread_mutex_lock(&mutex);
    /* a kernel that had not ended at the forced flush has no times */
    if (out && start > 0 && end >= start)
        fprintf(out, "%" PRIu64 "\t%" PRIu64 "\t%" PRIu32 "\t%s\n", start, end, stream,
                name ? name : "?");
    pthread_mutex_unlock(&mutex);
}

static void write_activity(const CUpti_Activity *r)
{
    if (r->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel10 *k = (const CUpti_ActivityKernel10 *)r;
        write_record(k->start, k->end, k->streamId, k->name);
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy6 *c = (const CUpti_ActivityMemcpy6 *)r;
        write_record(c->start, c->end, c->streamId, copy_name(c->copyKind));
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY2) {
        const CUpti_ActivityMemcpyPtoP4 *c = (const CUpti_ActivityMemcpyPtoP4 *)r;
        write_record(c->start, c->end, c->streamId, copy_name(CUPTI_ACTIVITY_MEMCPY_KIND_PTOP));
    } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *m = (const CUpti_ActivityMemset4 *)r;
        write_record(m->start, m->end, m->streamId, "[memset]");
    }
}

static void CUPTIAPI request_buffer(uint8_t **buffer, size_t *size, size_t *max_records)
{
    *buffer = aligned_alloc(ALIGNMENT, BUFFER);
    *size = *buffer ? BUFFER : 0; /* no memory: CUPTI drops the records and counts them */
    *max_records = 0;             /* as many records as fit */
}

static int is_open(void)
{
    pthread_mutex_lock(&mutex);
    const int open = out != NULL;
    pthread_mutex_unlock(&mutex);
    return open;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size,
                                 size_t valid)
{
    CUpti_Activity *r = NULL;
    size_t lost = 0;
    (void)size;
    if (is_open()) {
        while (valid > 0 && cuptiActivityGetNextRecord(buffer, valid, &r) == CUPTI_SUCCESS)
            write_activity(r);
        if (cuptiActivityGetNumDroppedRecords(context, stream, &lost) != CUPTI_SUCCESS)
            lost = 0;
        pthread_mutex_lock(&mutex);
        dropped += lost;
        if (out)
            fflush(out);
        pthread_mutex_unlock(&mutex);
    }
    free(buffer);
}

/* Runs before CUDA's own exit handlers, which were registered earlier, so the context still exists.
 * The forced flush calls take_buffer. Then recording ends; a buffer that another thread still
 * delivers is only freed. */
static void finish(void)
{
    if (getpid() != owner)
        return;
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityDisable(CUPTI_ACTIVITY_KIND_MEMCPY);
    cuptiActivityDisable(CUPTI_ACTIVITY_KIND_MEMCPY2);
    cuptiActivityDisable(CUPTI_ACTIVITY_KIND_MEMSET);
    pthread_mutex_lock(&mutex);
    if (dropped)
        fprintf(stderr,
                "kernel_times: CUPTI dropped %zu records: the times are too short by those\n",
                dropped);
    fclose(out);
    out = NULL;
    pthread_mutex_unlock(&mutex);
}

/* Whether the loaded library is the version of the headers, which define the layout of records.
 * LD_LIBRARY_PATH may select another version, with another layout. */
static int is_the_library_compiled_for(void)
{
    uint32_t version = 0;
    Dl_info found = { 0 };
    if (!works(cuptiGetVersion(&version), "cuptiGetVersion"))
        return 0;
    if (version == CUPTI_API_VERSION)
        return 1;
    dladdr((void *)cuptiGetVersion, &found);
    fprintf(stderr,
            "kernel_times: %s has CUPTI's version %u; expected %u, of the headers that this was "
            "compiled with. No kernel's "
            "times will be written; take that folder out of LD_LIBRARY_PATH, or compile with its "
            "headers: make CUPTI_HOME=...\n",
            found.dli_fname ? found.dli_fname : "libcupti", version, (unsigned)CUPTI_API_VERSION);
    return 0;
}

static int start(void)
{
    return works(cuptiActivityRegisterCallbacks(request_buffer, take_buffer),
                 "cuptiActivityRegisterCallbacks") &&
           works(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL),
                 "cuptiActivityEnable(CONCURRENT_KERNEL)") &&
           works(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY), "cuptiActivityEnable(MEMCPY)") &&
           works(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY2),
                 "cuptiActivityEnable(MEMCPY2)") &&
           works(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET), "cuptiActivityEnable(MEMSET)");
}

/* CUDA calls this when a process first uses CUDA. */
__attribute__((visibility("default"))) int InitializeInjection(void);
int InitializeInjection(void)
{
    char path[4096];
    const char *folder = getenv("KERNEL_TIMES");
    if (out || !is_the_library_compiled_for())
        return 1;
    owner = getpid();
    snprintf(path, sizeof path, "%s/%ld.tsv", folder ? folder : ".", (long)owner);
    out = fopen(path, "we");
    if (!out)
        perror(path);
    else if (start())
        atexit(finish);
    return 1;
}
