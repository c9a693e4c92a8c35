/* What follows from the tokens of one sequence. Inside data/ only. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* target[t] = token[t+1]; -1 at the last position, where mask (T bools; NULL: none) of the next token is 0, and where
 * the next token is `padding` (-1: none). Returns the number of targets >= 0. */
long sequence_targets(int *target, const int *token, const uint8_t *mask, int T, int padding);

/* True if an n-gram of min_period .. max_period tokens occurs max_count times or more in immediate succession. */
bool sequence_repeats(const int *token, int T, int min_period, int max_period, int max_count);
