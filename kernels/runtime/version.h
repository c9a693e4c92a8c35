/* The version of this program. It covers the command line, the keys of the configuration, and the
 * formats of files. */
#pragma once
#define COAT_VERSION "0.1.0"
