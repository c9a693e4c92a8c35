/* Texts made from the table of keys. */
#pragma once
#include <stdio.h>

void help_usage(FILE *f);   /* prints the output of ./train without arguments */
void help_version(FILE *f); /* prints the output of ./train --version */
/* --help=name: a key or a section; NULL: all. Dies if there is none */
void help_print(FILE *f, const char *name);
/* ./train --help=markdown: the table in configs/README.md */
void help_markdown(FILE *f);
/* ./train --completion: a script for bash */
void help_completion(FILE *f);
