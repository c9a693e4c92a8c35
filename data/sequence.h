/* Targets, document starts and repetitions of one sequence. Inside data/ only. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* target[t] = token[t+1]; -1 at the last position, if mask (T bools; NULL: none) of the next token
 * is 0, and if the next token is `padding` (-1: none). Returns the number of targets >= 0. */
long sequence_targets(int *target, const int *token, const uint8_t *mask, int T, int padding);

/* begins[t] = 1 where a document begins: at 0 and after each eos (-1: none), which belongs to the
 * document that it ends; else 0 */
void sequence_begins(uint8_t *begins, const int *token, int T, int eos);

/* True if an n-gram of min_period .. max_period tokens occurs max_count times or more in immediate
 * succession. */
bool sequence_repeats(const int *token, int T, int min_period, int max_period, int max_count);
