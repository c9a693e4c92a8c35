/* What the host makes of a batch's tokens, since it has them first and time to spare: their order in the embedding table, by a
 * counting sort, and the documents that they form. */
#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/error.h"

void sort_tokens(TokenAt *sorted, const int *tokens, int N, int V)
{
    int *next = xcalloc((size_t)V + 1, sizeof *next);        /* [v]: where the next v goes */
    for (int n = 0; n < N; n++) {
        CHECK(tokens[n] >= 0 && tokens[n] < V, "token %d at %d; the embedding has %d rows", tokens[n], n, V);
        next[tokens[n] + 1]++;
    }
    for (int v = 1; v < V; v++)
        next[v] += next[v - 1];
    for (int n = 0; n < N; n++)
        sorted[next[tokens[n]]++] = (TokenAt){ tokens[n], n };
    free(next);
}

/* The eos belongs to the document that it ends; what follows the last eos of a sequence is a document too. */
int document_starts(int *start, int *longest, const int *tokens, int B, int T, int eos)
{
    int count = 0, first = 0, N = B * T;
    *longest = 0;
    for (int n = 0; n < N; n++) {
        bool ends = (eos >= 0 && tokens[n] == eos) || (n + 1) % T == 0;
        if (!ends)
            continue;
        start[count++] = first;
        *longest = n + 1 - first > *longest ? n + 1 - first : *longest;
        first = n + 1;
    }
    start[count] = N;
    return count;
}
