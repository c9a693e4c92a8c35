/* The tensors of a checkpoint, and copies between files, host memory and the units in device
 * memory. */
#pragma once
#include "model/store/fsdp.h"
#include "model/checkpoint/safetensors.h"

/* MODEL: all weights except adapters. BASE: the weights in the folder of an adapter's base; without
 * adapters, and without a projector that is trained with adapters. ADAPTER: the adapters and this
 * projector. OPTIMIZER: the optimizer's states. */
typedef enum { LAYOUT_MODEL, LAYOUT_BASE, LAYOUT_OPTIMIZER, LAYOUT_ADAPTER } LayoutKind;
/* a weight; a state of the optimizer; the scales of a state's groups */
typedef enum { ENTRY_WEIGHT, ENTRY_STATE, ENTRY_SCALE } EntryKind;

/* One tensor of a file, and the range [first, first + held) of a unit's region that belongs to it.
 * The range counts elements; for scales, groups. Without tensor ranks it is the whole tensor,
 * `count` elements. With tensor ranks it is this rank's slice, which may be several ranges of the
 * tensor. */
typedef struct {
    /* name of a HfTensor; for a state, followed by the state's name; for scales, also by
     * ".scale" */
    char name[160];
    EntryKind kind;
    int state;       /* index into Shard.state; unused for a weight */
    int unit, param; /* index into UnitLayout.param */
    Region region;
    const char *dtype; /* name of the type in safetensors */
    /* number of weights per element: 1; for ENTRY_SCALE, the size of a group */
    size_t per;
    size_t bytes;              /* bytes of an element; for ENTRY_SCALE, of all scales of a group */
    size_t first, count, held; /* numbers of elements */
    /* if tensor ranks cut the parameter: the parameter; NULL: the tensor is whole */
    const Param *cut;
    /* if `cut`: start of the tensor in this rank's slice, and in the whole parameter */
    size_t in_param, in_whole;
    /* another tensor rank has the same elements, writes them and adds them to checksums */
    bool is_copy;
    bool is_read; /* the entry was read already: layout_read only checks its checksum */
    int dims;
    size_t shape[2];
    /* >= shape[0]: files may include the padding rows of the vocabulary */
    size_t max_rows;
    int file; /* index into Layout.file */
} LayoutEntry;

typedef struct {
    int num_entries, num_files;
    LayoutEntry *entry;
    NameIndex names; /* index of `entry` by name */
    SafeFile **file; /* the files, described and laid out; NULL without a folder */
    /* [num_entries]: CRC-32C of a tensor's bytes in a file: the contribution of this rank, later
     * the combined checksum */
    uint32_t *sum;
} Layout;

/* The layout depends only on the architecture, the recipe and the optimizer: it is the same on
 * every rank, for any number of ranks. `folder`: where the files are; NULL: only the entries are
 * described. A file has whole units, up to `file_limit` bytes; all adapters are in one file.
 * Weights of region QUANTIZED have entries, but cannot be saved. */
Layout layout_make(const char *folder, LayoutKind kind, const ParamStore *store, size_t file_limit);
void layout_free(Layout *l);

/* Elements [first, end) of a unit's region that this rank writes (layout_ranges.h). */
typedef struct {
    size_t first, end;
} Range;
size_t layout_bytes(const Layout *l, const Range *own);

/* This rank's slice of a weight or a state, extended to whole groups. The tensor is empty if this
 * rank has no slice. */
Tensor layout_part(const LayoutEntry *p, const Shard *s);

/* Copies this rank's slices to host memory of layout_bytes() bytes. */
void layout_snapshot(void *snapshot, const Layout *l, const Range *own, const ParamStore *store);

/* Writes a snapshot into the files, which rank 0 has created. Stores this rank's contributions to
 * checksums in l->sum. The data are on disk when it returns. Uses neither the device nor MPI and
 * never dies, so another thread may call it. Returns NULL, or an error text with the file's name,
 * valid as long as the layout. */
const char *layout_write(Layout *l, const Range *own, const void *snapshot);

/* Combines l->sum of all ranks. All ranks must call this when all have written. */
void layout_sum(Layout *l);

/* Reads this rank's slice of every entry from the `count` files. Converts F32, BF16, F16 and codes
 * with scales [coded_source.h] as needed. For entries of region QUANTIZED, which load_quantized has
 * read before, and entries with is_read, only checks checksums. All ranks of a shard group must
 * call this; together they read everything. Dies on a tensor that is missing, or has a wrong shape,
 * a type that cannot be converted, or a wrong checksum; the message names the tensor. */
void layout_read(Layout *l, ParamStore *store, SafeFile *const *files, int count);

/* Finds the tensor of an entry in the files. Dies as layout_read does. */
Found layout_need(const LayoutEntry *p, SafeFile *const *files, int count);

/* Reads a weight chunk by chunk. */
typedef struct {
    const LayoutEntry *entry;
    SafeFile *const *files;
    int count;
    Found from;
    void *raw;    /* buffer for elements in the file's type */
    uint32_t sum; /* CRC-32C of the fetched bytes, if the tensor has a checksum */
} EntryReader;
/* As layout_need. For a weight stored as codes and scales, the tensor is NULL and the file is the
 * file of the codes. */
Found layout_find(const LayoutEntry *p, SafeFile *const *files, int count);
/* Reads elements [at, at + n) as type `dtype`. `to` has space for n floats. */
void layout_fetch(EntryReader *r, void *to, const char *dtype, size_t at, size_t n);
