/* Rank 0 creates a file with a random name, and all other ranks try to create the same file. If the
 * folder is shared, the file server refuses to create the file again (EEXIST). A lookup would not
 * be enough: the host's cache could answer it. If the folder is not shared, the first rank of a
 * host that tries can create the file; other ranks of the host may then find this file. */
#include "model/run/shared_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/runtime/agree.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

enum { NAME = 64 };

/* Returns 0 if the file did not exist (it is deleted again), EEXIST if it exists, or another
 * error. */
static int try_to_make(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return errno;
    close(fd);
    unlink(path);
    return 0;
}

void shared_folder_check(const char *folder)
{
    char path[PATH_MAX], host[NAME] = "", first_host[NAME];
    const bool makes = comm_rank() == 0;
    int found = EEXIST;
    if (comm_size() == 1)
        return;
    gethostname(host, sizeof host - 1);
    memcpy(first_host, host, sizeof host);
    snprintf(path, sizeof path, "%s/.sign-XXXXXX", folder);
    const int fd = makes ? mkstemp(path) : -1;
    if (makes && fd < 0)
        die("save_folder %s: cannot write: %s", folder, strerror(errno));
    comm_broadcast(path, sizeof path, 0);
    comm_broadcast(first_host, sizeof first_host, 0);
    if (!makes)
        found = try_to_make(path);
    const int other = agree_first(found != EEXIST);
    if (makes) {
        close(fd);
        unlink(path);
    }
    if (other == comm_rank())
        die("save_folder %s of rank %d on %s is not the same folder as rank 0's on %s%s%s: it must "
            "be on a file system that all hosts share, and writable for every rank",
            folder, other, host, first_host, found ? ": " : "", found ? strerror(found) : "");
    if (other >= 0)
        comm_barrier(); /* waits until the rank with the error has ended all ranks */
}
