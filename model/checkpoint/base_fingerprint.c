/* Three pages of each tensor are enough: a base that was trained further differs in nearly every
 * tensor. */
#include "model/checkpoint/base_fingerprint.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/crc32c.h"
#include "model/checkpoint/manifest.h"
#include "model/formats/adapter.h"

enum { PAGE = 4096 };

static uint32_t sum_of(const SafeFile *f, const SafeTensor *t)
{
    const size_t bytes = t->end - t->begin, n = bytes < PAGE ? bytes : PAGE;
    const size_t offset[] = { 0, (bytes - n) / 2, bytes - n };
    char page[PAGE];
    uint32_t sum = crc32c(crc32c(0, t->name, strlen(t->name) + 1), t->dtype, strlen(t->dtype));
    for (int i = 0; i < 3; i++) {
        safetensors_read(f, page, t, offset[i], n);
        sum = crc32c(sum, page, n);
    }
    return sum;
}

uint64_t base_fingerprint(const WeightFiles *base)
{
    uint64_t sum = 0;
    for (int i = 0; i < base->count; i++)
        for (int k = 0; k < base->file[i]->count; k++)
            sum += sum_of(base->file[i], &base->file[i]->tensor[k]);
    return sum ? sum : 1;
}

void base_fingerprint_check(const char *adapters, const char *base_path, uint64_t fingerprint,
                            bool continues)
{
    json_t *manifest = weight_files_manifest(adapters);
    const uint64_t then = manifest ? manifest_base(manifest, adapters) : 0;
    /* PEFT may save a name that is not a path on this host: then nothing can be compared. */
    char *trained = adapter_base(adapters), *there = trained ? realpath(trained, NULL) : NULL,
         *here = realpath(base_path, NULL);
    const bool gone = trained && !there && *trained == '/';
    const bool moved = here && (gone || (there && strcmp(there, here) != 0));
    if (then && then != fingerprint && (continues || !moved))
        die("%s: these adapters were trained with a base whose weights differ from the weights in "
            "%s; give the folder of the original base with --lora.base_path=FOLDER (to use these "
            "weights anyway, "
            "delete base_sample from trainer.json)",
            adapters, base_path);
    if (moved && then != fingerprint)
        warn("%s: these adapters were trained with the base %s%s, and are now used with %s%s",
             adapters, there ? there : trained, gone ? ", which does not exist any more" : "", here,
             then ? ", which has other weights" : "");
    json_decref(manifest);
    free(trained);
    free(there);
    free(here);
}
