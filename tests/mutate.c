/* Changes of inputs. */
#include "tests/mutate.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/random.h"
#include "kernels/runtime/error.h"

uint64_t draw(Draws *d, uint64_t below)
{
    return random_bits(d->seed, d->drawn++) % below;
}

Input input_copy(const void *data, size_t size)
{
    Input in = { xmalloc(size), size };
    memcpy(in.data, data, size);
    return in;
}

Input input_read(const char *path)
{
    FILE *f = fopen(path, "rb");
    Input in = { NULL, 0 };
    char piece[65536];
    if (!f)
        die("%s: cannot read: %s", path, strerror(errno));
    for (size_t n; (n = fread(piece, 1, sizeof piece, f)) > 0;)
        input_replace(&in, in.size, 0, piece, n);
    fclose(f);
    return in;
}

void input_write(const Input *in, const char *path)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(in->data, 1, in->size, f) != in->size || fclose(f) != 0)
        die("%s: cannot write: %s", path, strerror(errno));
}

void input_free(Input *in)
{
    free(in->data);
    *in = (Input){ 0 };
}

void input_replace(Input *in, size_t at, size_t without, const void *data, size_t size)
{
    Input out = { xmalloc(in->size - without + size), in->size - without + size };
    memcpy(out.data, in->data ? in->data : "", at);
    memcpy(out.data + at, data, size);
    memcpy(out.data + at + size, (in->data ? in->data : "") + at + without,
           in->size - at - without);
    input_free(in);
    *in = out;
}

static const char *const odd[] = {
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "-6",
    "3",
    "7",
    "16",
    "127",
    "128",
    "255",
    "256",
    "1000",
    "4096",
    "65535",
    "65536",
    "1e6",
    "1e9",
    "2147483520",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "1e15",
    "9e18",
    "9000000000000000001",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e309",
    "-1e400",
    "1e-30",
    "1e-320",
    "0.5",
    "2.5",
    "0.1",
    "0x10",
    "0x1p3",
    "1_000",
    "007",
    "+5",
    ".5",
    "5.",
    "1e",
    "e5",
    "inf",
    "-inf",
    ".inf",
    "nan",
    ".nan",
    "1ep",
    "0.5ep",
    "1e9T",
    "1e15T",
    "9e18T",
    "9e18ep",
    "null",
    "Null",
    "~",
    "",
    "true",
    "No",
    "on",
    "[]",
    "{}",
    "[1, 2]",
    "[[a], [b]]",
    "{a: b}",
    "[null]",
    "a b",
    " a",
    "a ",
    "a: b",
    "a #b",
    "#",
    "-",
    "--",
    "- a",
    "? a",
    ": b",
    "*a",
    "&a",
    "!a",
    "!!int 3",
    "%a",
    "@a",
    "`a",
    "|",
    ">",
    "'a",
    "\"a",
    "'a'",
    "\"a\"",
    "\"\\0\"",
    "\"a\\\"",
    "\\",
    "a\nb",
    "a\rb",
    "a\tb",
    "\t",
    "\x01",
    "\x7f",
    "\x80",
    "\xff",
    "\xc3\x28",
    "\xc0\xaf",
    "\xed\xa0\x80",
    "\xf4\x90\x80\x80",
    "\xc2\x85",
    "\xe2\x80\xa8",
    "\xef\xbb\xbf",
    "\xef\xbf\xbe",
    "\xc3\xa9",
    "\xe6\xbc\xa2",
    "\xf0\x9f\x98\x80",
    "${",
    "${}",
    "${seed}",
    "$${seed}",
    "~/a",
    "~",
    "/",
    ".",
    "..",
    "../a",
    "/tmp/a",
    "a/b",
    "s3://a/b",
    "://",
    "*.npy",
    "[",
    "[a",
    "{",
    "]",
    "}",
    ",",
    "0000000000000000000000000000000000000000000000000000000000000000000000012",
    ("0."
     "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
     "0000000000000000000000000"
     "0000000005"),
};
enum { NUM_ODD = sizeof odd / sizeof odd[0] };

const char *odd_value(Draws *d)
{
    return odd[draw(d, NUM_ODD)];
}

static void insert_text(Input *in, size_t at, const char *text)
{
    input_replace(in, at, 0, text, strlen(text));
}

/* Returns the position of a number or word at a random place, or an empty range there. */
static size_t find_word(const Input *in, Draws *d, size_t *length)
{
    size_t at = draw(d, in->size + 1), end;
    while (at < in->size && !isalnum((unsigned char)in->data[at]))
        at++;
    for (end = at;
         end < in->size && (isalnum((unsigned char)in->data[end]) || strchr("._-", in->data[end]));)
        end++;
    *length = end - at;
    return at;
}

static size_t find_line(const Input *in, Draws *d, size_t *length)
{
    size_t at = draw(d, in->size + 1), end = at;
    while (at > 0 && in->data[at - 1] != '\n')
        at--;
    while (end < in->size && in->data[end++] != '\n')
        ;
    *length = end - at;
    return at;
}

/* Usually returns a short piece. */
static size_t find_range(const Input *in, Draws *d, size_t *length)
{
    const size_t at = draw(d, in->size + 1), left = in->size - at;
    *length = draw(d, 4) ? draw(d, (left < 32 ? left : 32) + 1) : draw(d, left + 1);
    return at;
}

enum { FLIP, BYTE, ODD, WORD, REMOVE, REPEAT, LINE, MOVE, PIECE, CUT, NUM_CHANGES };

static void change(Input *in, Draws *d, const Input *other, const char *const *words)
{
    size_t n, m, at = find_range(in, d, &n), from;
    int count = 0;
    while (words[count])
        count++;
    switch (draw(d, NUM_CHANGES)) {
    case FLIP:
        if (at < in->size)
            in->data[at] ^= (char)(1 << draw(d, 8));
        break;
    case BYTE:
        if (at < in->size)
            in->data[at] = (char)draw(d, 256);
        break;
    case REMOVE: input_replace(in, at, n, "", 0); break;
    case CUT: input_replace(in, at, in->size - at, "", 0); break;
    case WORD:
        if (count)
            insert_text(in, at, words[draw(d, (uint64_t)count)]);
        break;
    case ODD: {
        const char *text = odd_value(d);
        at = find_word(in, d, &n);
        input_replace(in, at, n, text, strlen(text));
        break;
    }
    case REPEAT:
    case MOVE:
    case LINE: {
        at = find_line(in, d, &n);
        Input line = input_copy(in->data + at, n);
        const bool moves = draw(d, 2);
        if (moves)
            input_replace(in, at, n, "", 0);
        at = find_line(in, d, &m);
        for (uint64_t doublings = draw(d, 8) ? 0 : draw(d, 9); doublings > 0 && line.size < 4096;
             doublings--)
            input_replace(&line, line.size, 0, line.data, line.size);
        input_replace(in, at, 0, line.data, line.size);
        input_free(&line);
        break;
    }
    default: from = find_range(other, d, &m); input_replace(in, at, n, other->data + from, m);
    }
}

void input_mutate(Input *in, Draws *d, const Input *other, const char *const *words)
{
    for (uint64_t times = 1 + draw(d, 4); times > 0; times--)
        change(in, d, other, words);
}
