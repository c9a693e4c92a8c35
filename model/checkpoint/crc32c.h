/* CRC-32C (Castagnoli), as RFC 3720 appendix B.4 has it: reflected, begun with and ended by an inversion. Any thread may call. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Of `bytes` bytes behind those whose checksum is `crc`; 0: of none. By the CPU's instruction where it has one (SSE4.2, ARMv8), at
 * the speed of memory. */
uint32_t crc32c(uint32_t crc, const void *data, size_t bytes);

/* The same without that instruction. */
uint32_t crc32c_by_table(uint32_t crc, const void *data, size_t bytes);

/* What a part adds to the checksum of a whole: that of A and B, one behind the other, is
 * crc32c_shift(crc of A, bytes of B) ^ crc of B. */
uint32_t crc32c_shift(uint32_t crc, uint64_t bytes);
