/* Small files, held in rank 0's memory from loading to saving. */
#include "model/companions.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm.h"
#include "model/error.h"
#include "model/folder.h"

static const char *const names[] = {
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
};
enum { COUNT = sizeof names / sizeof names[0] };

static struct { char *data; size_t bytes; } held[COUNT];        /* data: NULL if there is no such file */

static void read_file(int i, const char *path)
{
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

void companions_write(const char *folder)
{
    for (int i = 0; i < COUNT; i++) {
        char *path = xasprintf("%s/%s", folder, names[i]);
        if (held[i].data)
            folder_write(path, held[i].data, held[i].bytes);
        free(path);
    }
}
