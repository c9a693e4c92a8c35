/* Small files, held in rank 0's memory from loading to saving. */
#include "model/checkpoint/companions.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/error.h"
#include "model/checkpoint/folder.h"

static const char *const names[] = {
    "config.json",      /* not handed on as it is: companions_complete */
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
};
enum { COUNT = sizeof names / sizeof names[0] };

static struct { char *data; size_t bytes; } held[COUNT];        /* data: NULL if there is no such file */

static void read_file(int i, const char *path)
{
    check_regular(path);
    FILE *file = fopen(path, "rb");
    long bytes = -1;
    free(held[i].data);
    held[i].data = NULL;
    if (!file && errno == ENOENT)
        return;
    if (file && fseek(file, 0, SEEK_END) == 0)
        bytes = ftell(file);
    if (bytes >= 0) {
        rewind(file);
        held[i].data = xmalloc((size_t)bytes + 1);
        held[i].bytes = fread(held[i].data, 1, (size_t)bytes, file);
    }
    if (bytes < 0 || held[i].bytes != (size_t)bytes)
        die("%s: cannot read: %s", path, strerror(errno));
    fclose(file);
}

void companions_read(const char *folder)
{
    for (int i = 0; i < COUNT && comm_rank() == 0; i++) {
        char *path = xasprintf("%s/%s", folder, names[i]);
        read_file(i, path);
        free(path);
    }
}

void companions_complete(json_t *config)
{
    json_t *loaded = held[0].data ? json_loadb(held[0].data, held[0].bytes, 0, NULL) : NULL;
    json_t *bos = json_object_get(loaded, "bos_token_id"), *eos = json_object_get(loaded, "eos_token_id");
    json_t *length = json_object_get(loaded, "max_position_embeddings");
    if (bos)
        json_object_set(config, "bos_token_id", bos);
    if (json_is_array(eos) && json_equal(json_array_get(eos, 0), json_object_get(config, "eos_token_id")))
        json_object_set(config, "eos_token_id", eos);
    if (json_integer_value(length) > json_integer_value(json_object_get(config, "max_position_embeddings")))
        json_object_set(config, "max_position_embeddings", length);
    json_decref(loaded);
}

void companions_write(const char *folder)
{
    for (int i = 1; i < COUNT; i++) {
        char *path = xasprintf("%s/%s", folder, names[i]);
        if (held[i].data)
            folder_write(path, held[i].data, held[i].bytes);
        free(path);
    }
}
