/* The version of this program: of its command line, its configuration and its files. */
#pragma once
#define COAT_VERSION "0.1.0"
