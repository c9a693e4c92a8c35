/* Whether this is a build with sanitizers, which make everything several times slower. Such a build
 * runs only some of the cases that differ in values but not in the memory that they read and write.
 * Builds without sanitizers run all cases. */
#pragma once

#if defined __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif
