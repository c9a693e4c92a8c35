/* Texts of a configuration: which ones may be in it, and how they are written as YAML. */
#include "model/config/table.h"

#include <ctype.h>
#include <jansson.h>
#include <string.h>
#include <strings.h>

#include "kernels/error.h"

static void check_text(const YamlNode *n, const char *name, const char *text)
{
    json_t *json = json_string(text);
    if (!json)
        die("%s: %s: its text is not UTF-8, so neither YAML nor JSON can hold it; take another name", yaml_place(n), name);
    json_decref(json);
    if (strstr(text, "${") || strncmp(text, "~/", 2) == 0)
        die("%s: %s: '%s' would be evaluated again where the run's config.yaml is read; take a name without ${ and ~/", yaml_place(n),
            name, text);
}

void config_check_texts(const YamlNode *n, const char *name)
{
    if (n->text)
        check_text(n, name, n->text);
    for (int i = 0; i < n->num_children; i++) {
        if (n->child[i]->key)
            check_text(n->child[i], name, n->child[i]->key);
        config_check_texts(n->child[i], name);
    }
}

static bool is_plain(const char *text)
{
    return *text && strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-") == strlen(text) &&
           (isalnum((unsigned char)*text) || *text == '/') && !key_listed("null|true|false|yes|no|on|off", text);
}

/* A character of UTF-8 that YAML 1.1 or 1.2 takes for a line's end, a mark of the file, or none at all. */
static bool is_control(const char *c, unsigned *code, int *length)
{
    const unsigned char *u = (const unsigned char *)c;
    *length = u[0] < 0x80 ? 1 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : 4;
    *code = *length == 1 ? u[0] : *length == 2 ? (u[0] & 31u) << 6 | (u[1] & 63u)
          : *length == 3 ? (u[0] & 15u) << 12 | (u[1] & 63u) << 6 | (u[2] & 63u) : 0x10000;
    return *code < ' ' || (*code >= 0x7f && *code < 0xa0) || *code == 0x2028 || *code == 0x2029 || *code == 0xfeff || *code == 0xfffe ||
           *code == 0xffff;
}

void value_print_text(FILE *f, const char *text)
{
    unsigned code;
    int length;
    if (!text || is_plain(text)) {
        fputs(text ? text : "null", f);
        return;
    }
    fputc('"', f);
    for (const char *c = text; *c; c += length) {
        if (is_control(c, &code, &length)) {
            fprintf(f, "\\u%04x", code);
            continue;
        }
        if (*c == '"' || *c == '\\')
            fputc('\\', f);
        fwrite(c, 1, (size_t)length, f);
    }
    fputc('"', f);
}
