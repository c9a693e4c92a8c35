/* Whether the sanitizers watch, under which everything takes several times as long. Cases that differ in values but not in what they
 * read and write then need not all run: they do without. */
#pragma once

#if defined __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif
