/* CRC-32C (Castagnoli) [RFC 3720, appendix B.4]: bit-reflected, and inverted at the start and the
 * end. Thread-safe. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Extends the checksum `crc` by `bytes` more bytes; crc 0: no bytes so far. Uses the CPU's CRC
 * instruction if there is one (SSE4.2, ARMv8), at the speed of memory. */
uint32_t crc32c(uint32_t crc, const void *data, size_t bytes);

/* As crc32c, without the CPU's CRC instruction. */
uint32_t crc32c_by_table(uint32_t crc, const void *data, size_t bytes);

/* Combines checksums: the checksum of A followed by B is crc32c_shift(crc of A, bytes of B) ^ crc
 * of B. */
uint32_t crc32c_shift(uint32_t crc, uint64_t bytes);
