#include "model/run/save_folder.h"

#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/folder.h"
#include "model/checkpoint/saved_as.h"
#include "model/formats/adapter.h"
#include "model/formats/file.h"
#include "model/run/shared_folder.h"

void save_folder_make(const char *path)
{
    struct stat status;
    char *copy = xstrdup(path);
    int error = mkdir(path, 0777) == 0 ? 0 : errno;
    if (error == ENOENT) {
        save_folder_make(dirname(copy));
        error = mkdir(path, 0777) == 0 ? 0 : errno;
    }
    if (error && error != EEXIST)
        die("save_folder: cannot create %s: %s", path, strerror(error));
    if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode))
        die("save_folder: %s is not a folder; give another --save_folder", path);
    free(copy);
}

/* ---- existing content ------------------------------------------------------------------------ */

/* Whether the folder has content of a run: metrics or checkpoints. An empty log does not count,
 * because a run on a full disk leaves one. */
static bool holds_run(const char *folder)
{
    static const char *const signs[] = { "config.yaml", "metrics.jsonl", "latest" };
    char *newest = folder_newest(folder);
    bool found = newest != NULL;
    for (size_t i = 0; i < sizeof signs / sizeof signs[0]; i++) {
        struct stat status;
        char *path = xasprintf("%s/%s", folder, signs[i]);
        found |= lstat(path, &status) == 0 && status.st_size > 0;
        free(path);
    }
    free(newest);
    return found;
}

/* Whether `path` is the folder, or lies in it. */
static bool lies_in(const char *path, const char *folder)
{
    char *inner = realpath(path, NULL), *outer = realpath(folder, NULL);
    const size_t n = outer ? strlen(outer) : 0;
    const bool lies =
        inner && outer && strncmp(inner, outer, n) == 0 && (!inner[n] || inner[n] == '/');
    free(inner);
    free(outer);
    return lies;
}

/* N of the folder's step<N> to which `path` leads, perhaps through links; -1: none. */
static long step_in(const char *folder, const char *path)
{
    long *steps, found = -1;
    for (int i = file_steps(&steps, folder, "") - 1; i >= 0 && found < 0; i--) {
        char *entry = xasprintf("%s/step%ld", folder, steps[i]);
        if (file_is_same(entry, path))
            found = steps[i];
        free(entry);
    }
    free(steps);
    return found;
}

static bool is_latest(const char *folder, const char *path)
{
    char *latest = folder_latest_path(folder);
    const bool same = latest && file_is_same(latest, path);
    free(latest);
    return same;
}

/* Whether `path` is an entry of the folder, or the target of a link among its checkpoints. */
static bool is_entry(const char *folder, const char *path)
{
    char *copy = xstrdup(path);
    const bool found = file_is_same(dirname(copy), folder) || is_latest(folder, path) ||
                       step_in(folder, path) >= 0;
    free(copy);
    return found;
}

/* Whether the run continues the source's state, not only its weights. */
static bool continues_state(const Config *c)
{
    return file_is_in(c->load_folder, "trainer.json") && !c->reset_trainer_state &&
           (c->model.lora.rank == 0 || adapter_is(c->load_folder));
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* N of a path that ends with step<N>; -1: the path ends otherwise. */
static long step_of(const char *folder)
{
    long step;
    return sscanf(strrchr(folder, '/'), "/step%ld", &step) == 1 ? step : -1;
}

/* A run that continues from an earlier step deletes its later checkpoints, so it needs
 * save_overwrite. */
static void check_rewind(const Config *c)
{
    char *last = folder_newest(c->save_folder), *here = realpath(c->load_folder, NULL);
    const bool later = last && here && strcmp(last, here) != 0 &&
                       (step_of(last) < 0 || step_of(last) > step_of(here));
    if (later && !c->save_overwrite)
        die("save_folder %s has a run that continued from %s to %s: --save_overwrite goes back and "
            "deletes later checkpoints, "
            "--save_folder=... uses another folder",
            c->save_folder, c->load_folder, last);
    free(last);
    free(here);
}

/* The base of adapters must not be in the save folder, because a run overwrites files and deletes
 * checkpoints there. */
static void check_base(const Config *c)
{
    const Lora *l = &c->model.lora;
    if (l->rank > 0 && l->base_path && lies_in(l->base_path, c->save_folder))
        die("%s, the base of the adapters (lora.rank %d), is in save_folder %s, where a run "
            "overwrites files and deletes "
            "checkpoints: give the adapters a save_folder of their own",
            l->base_path, l->rank, c->save_folder);
}

/* Dies if there is a run in the folder, unless the user asked to continue or overwrite it. */
static void check_folder(const Config *c, bool resumes)
{
    free(folder_latest(c->save_folder)); /* dies if `latest` is no link and no file of ours */
    const long foreign = folder_foreign_step(c->save_folder);
    if (foreign >= 0)
        die("save_folder %s: step%ld is not a checkpoint, and the run might replace or delete it: "
            "move it, or give "
            "another --save_folder",
            c->save_folder, foreign);
    if (c->load_folder && !resumes && file_is_in(c->load_folder, "trainer.json") &&
        is_entry(c->save_folder, c->load_folder))
        die("load_path %s is a checkpoint in save_folder %s, but a run that only uses its weights "
            "(reset_trainer_state, new "
            "adapters) is a new run: give this run a save_folder of its own",
            c->load_folder, c->save_folder);
    if (resumes && !c->continues)
        check_rewind(c);
    if (holds_run(c->save_folder) && !resumes && !c->try_load_latest_save && !c->save_overwrite)
        die("save_folder %s has a run already: --try_load_latest_save continues it, "
            "--save_overwrite replaces it, "
            "--save_folder=... uses another folder",
            c->save_folder);
}

/* Broadcasts the answer of rank 0. */
static bool agree(bool answer)
{
    comm_broadcast(&answer, sizeof answer, 0);
    return answer;
}

bool save_folder_prepare(const Config *c)
{
    bool resumes = c->continues;
    check_base(c);
    if (comm_rank() == 0) {
        save_folder_make(c->save_folder);
        if (c->load_folder && !c->continues)
            resumes = continues_state(c) && (is_entry(c->save_folder, c->load_folder) ||
                                             saved_as_in(c->load_folder, c->save_folder) == 1);
        check_folder(c, resumes);
    }
    resumes = agree(resumes);
    /* other hosts may have cached that the folder does not exist */
    save_folder_make(c->save_folder);
    shared_folder_check(c->save_folder);
    return resumes;
}

bool save_folder_has(const Config *c, long step)
{
    bool has = false;
    if (comm_rank() == 0) {
        char *real = realpath(c->load_folder, NULL), name[32];
        snprintf(name, sizeof name, "/step%ld", step);
        has = step_in(c->save_folder, c->load_folder) == step ||
              is_latest(c->save_folder, c->load_folder) ||
              (real && strcmp(strrchr(real, '/'), name) == 0);
        free(real);
    }
    return agree(has);
}

/* ---- start of the run ------------------------------------------------------------------------ */

static void point_latest(const Config *c, long step)
{
    char name[32], *real = realpath(c->load_folder, NULL);
    snprintf(name, sizeof name, "step%ld", step);
    const bool here = step_in(c->save_folder, c->load_folder) == step;
    if (here || real)
        folder_point_latest(c->save_folder, here ? name : real);
    free(real);
}

static void write_config(const Config *c)
{
    char *path = xasprintf("%s/config.yaml", c->save_folder),
         *temporary = xasprintf("%s/.config.yaml.tmp", c->save_folder);
    folder_write(temporary, c->text, strlen(c->text));
    if (rename(temporary, path) != 0)
        die("%s: cannot write: %s", path, strerror(errno));
    free(path);
    free(temporary);
}

/* Deletes the checkpoints of a run that this one replaces: otherwise --try_load_latest_save would
 * continue the replaced run. */
void save_folder_begin(const Config *c, bool resumes, long step, bool saved)
{
    if (comm_rank() != 0)
        return;
    watchdog_mark("tidying save_folder and writing config.yaml", -1);
    folder_clean(c->save_folder); /* frees space on a full disk */
    folder_try(c->save_folder);
    if (c->save_overwrite && !resumes)
        folder_clear(c->save_folder);
    /* if this run is interrupted before its next save, it must continue from here, not from a later
     * step */
    if (saved)
        point_latest(c, step);
    if (resumes && c->save_overwrite && !c->try_load_latest_save)
        folder_remove_later(c->save_folder, step);
    write_config(c);
}
