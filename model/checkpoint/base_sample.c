/* A base that was trained again in its place differs in nearly every tensor: three pages of each show it. */
#include "model/checkpoint/base_sample.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/crc32c.h"
#include "model/checkpoint/manifest.h"
#include "model/config/adapter.h"

enum { PAGE = 4096 };

static uint32_t sample_of(const SafeFile *f, const SafeTensor *t)
{
    const size_t bytes = t->end - t->begin, n = bytes < PAGE ? bytes : PAGE;
    const size_t places[] = { 0, (bytes - n) / 2, bytes - n };
    char page[PAGE];
    uint32_t sum = crc32c(crc32c(0, t->name, strlen(t->name) + 1), t->dtype, strlen(t->dtype));
    for (int i = 0; i < 3; i++) {
        safetensors_read(f, page, t, places[i], n);
        sum = crc32c(sum, page, n);
    }
    return sum;
}

uint64_t base_sample(const Source *base)
{
    uint64_t sum = 0;
    for (int i = 0; i < base->count; i++)
        for (int k = 0; k < base->file[i]->count; k++)
            sum += sample_of(base->file[i], &base->file[i]->tensor[k]);
    return sum ? sum : 1;
}

void base_check(const char *adapters, const char *base_path, uint64_t sample, bool goes_on)
{
    json_t *manifest = source_manifest(adapters);
    const uint64_t then = manifest ? manifest_base(manifest, adapters) : 0;
    /* Names that are no paths of this machine, as PEFT saves them, say nothing. */
    char *trained = adapter_base(adapters), *there = trained ? realpath(trained, NULL) : NULL, *here = realpath(base_path, NULL);
    const bool gone = trained && !there && *trained == '/';
    const bool moved = here && (gone || (there && strcmp(there, here) != 0));
    if (then && then != sample && (goes_on || !moved))
        die("%s: its adapters were trained beside other weights than those that are in %s now; --lora.base_path=FOLDER says where "
            "they are (if these are to take their place: take base_sample out of trainer.json)", adapters, base_path);
    if (moved && then != sample)
        warn("%s: its adapters were trained beside %s%s, and are now beside %s%s", adapters, there ? there : trained,
             gone ? ", which is gone" : "", here, then ? ", which has other weights" : "");
    json_decref(manifest);
    free(trained);
    free(there);
    free(here);
}
