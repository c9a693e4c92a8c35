/* A batch's tokens in the order of the embedding table: a counting sort on the host, which has the tokens first and time
 * to spare. */
#include <stdlib.h>

#include "kernels/kernels.h"
#include "model/error.h"

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
