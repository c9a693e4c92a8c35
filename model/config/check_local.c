/* Checks that paths are local. The message about a URL says how to fetch the files. */
#include "model/config/check_local.h"

#include <string.h>

#include "kernels/runtime/error.h"

/* The shell command that fetches a file consists of `command`, the path without its scheme, and
 * `to`. The last row is for all other stores. */
static const struct {
    const char *scheme, *command, *to;
} stores[] = {
    { "s3://", "aws s3 cp s3://", " ." },
    { "r2://", "aws s3 cp --endpoint-url https://ACCOUNT.r2.cloudflarestorage.com s3://", " ." },
    { "weka://", "aws s3 cp --endpoint-url YOUR_WEKA_URL s3://", " ." },
    { "gs://", "gcloud storage cp gs://", " ." },
    { "http://", "wget -x http://", "" },
    { "https://", "wget -x https://", "" },
    { "", "with the tool of that store: ", "" },
};

void check_local(Reader *r, const char *key, char **paths, int count)
{
    int remote = 0, first = 0;
    for (int i = count - 1; i >= 0; i--)
        if (strstr(paths[i], "://")) {
            remote++;
            first = i;
        }
    if (!remote)
        return;
    int store = 0;
    while (strncmp(paths[first], stores[store].scheme, strlen(stores[store].scheme)) != 0)
        store++;
    const YamlNode *n = yaml_find_text(yaml_find(r->root, key), paths[first]);
    die("%s: %s: '%s'%s remote; only local files are read. Download the training data, for "
        "example\n"
        "  %s%s%s\nthen give the local files: --%s='folder/*.npy'",
        n ? yaml_where(n) : reader_where(r, key), key, paths[first],
        remote > 1 ? " and others are" : " is", stores[store].command,
        paths[first] + strlen(stores[store].scheme), stores[store].to, key);
}
