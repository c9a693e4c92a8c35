/* Rank 0 creates a file of a random name, and all other ranks try to create it, too. In a shared
 * folder the file server refuses that (EEXIST); a mere lookup could be answered from the host's
 * cache. The ranks of a host do this one after the other, because in a wrong folder they would find
 * each other's files. */
#include "model/run/shared_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/agree.h"

/* Rank 0's file, as broadcast to all ranks. */
typedef struct {
    uint64_t number;
    char host[64];
} Sign;

/* 0: it did not exist (it is deleted again); EEXIST: it exists; or another error. */
static int try_to_make(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return errno;
    close(fd);
    unlink(path);
    return 0;
}

static char *make_sign(const char *folder, Sign *s)
{
    if (getrandom(&s->number, sizeof s->number, 0) != sizeof s->number)
        die("no random numbers: %s", strerror(errno));
    gethostname(s->host, sizeof s->host - 1);
    char *path = xasprintf("%s/.sign-%016llx", folder, (unsigned long long)s->number);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        die("save_folder %s: cannot write: %s", folder, strerror(errno));
    close(fd);
    return path;
}

/* try_to_make on all ranks but rank 0, one rank of a host at a time; EEXIST on rank 0. All ranks
 * call. */
static int try_in_turn(const char *path)
{
    double turns = comm_local_size();
    int found = EEXIST;
    comm_max(&turns, 1);
    for (int turn = 0; turn < (int)turns; turn++) {
        if (turn == comm_local_rank() && comm_rank() != 0)
            found = try_to_make(path);
        comm_barrier();
    }
    return found;
}

void shared_folder_check(const char *folder)
{
    if (comm_size() == 1)
        return;
    Sign s = { 0 };
    char *path = comm_rank() == 0 ? make_sign(folder, &s) : NULL, host[64] = "";
    comm_broadcast(&s, sizeof s, 0);
    if (!path)
        path = xasprintf("%s/.sign-%016llx", folder, (unsigned long long)s.number);
    const int found = try_in_turn(path);
    /* the first rank with another folder reports */
    const int first = agree_first(found != EEXIST);
    if (comm_rank() == 0)
        unlink(path);
    free(path);
    if (first < 0)
        return;
    gethostname(host, sizeof host - 1);
    if (comm_rank() == first)
        die("save_folder %s of rank %d on %s is not the same folder as rank 0's on %s%s%s: it must "
            "be on a file system that all "
            "hosts share, and writable for every rank",
            folder, comm_rank(), host, s.host, found ? ": " : "", found ? strerror(found) : "");
    comm_barrier(); /* until that rank ends all */
}
