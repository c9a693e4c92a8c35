#include "kernels/runtime/rank_state.h"

#include <string.h>

void state_write(SharedState *to, const void *member, size_t at, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof(uint64_t); i++) {
        uint64_t word;
        memcpy(&word, (const char *)member + i * sizeof word, sizeof word);
        atomic_store_explicit(&to->word[at / sizeof word + i], word, memory_order_relaxed);
    }
}

void state_read(void *member, const SharedState *from, size_t at, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof(uint64_t); i++) {
        const uint64_t word =
            atomic_load_explicit(&from->word[at / sizeof word + i], memory_order_relaxed);
        memcpy((char *)member + i * sizeof word, &word, sizeof word);
    }
}
