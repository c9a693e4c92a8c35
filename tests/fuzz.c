/* Reads damaged and odd inputs, which are made from valid ones. Each input must be read, or end the
 * program with a message that names the file. A crash, a report of a sanitizer, a hang, or a write
 * outside of the input's folder is a failure. So is a read outside of the folder, if the input is a
 * checkpoint. A configuration that was read and written out must read as the same configuration.
 *
 *     fuzz COUNT FIRST        the kept inputs of tests/fuzz, then inputs FIRST .. FIRST + COUNT - 1: each is a function
 *                             of its number, of the kept ones and of configs/
 *     fuzz KIND FILE          one kept input; prints its output
 *
 * scripts/fuzz builds it with the sanitizers and runs it in the top folder. Failing inputs are kept
 * in build/fuzz. Each input has a separate process. An input of a configuration is a file and
 * arguments, each after a line that begins with \x1f. */
#include <fcntl.h>
#include <glob.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "tests/fuzz_kinds.h"

enum { CPU_SECONDS = 5, SECONDS = 120, BATCH = 64 };

static const char *root;

/* ---- where files may be ---------------------------------------------------------------------- */

FILE *__real_fopen(const char *path, const char *mode);
int __real_open(const char *path, int flags, ...);
int __real_truncate(const char *path, off_t size);
FILE *__wrap_fopen(const char *path, const char *mode);
int __wrap_open(const char *path, int flags, ...);
int __wrap_truncate(const char *path, off_t size);

static void check_inside(const char *path, bool writes)
{
    if (now && (writes || !now->roams))
        demand(strncmp(path, now->folder, strlen(now->folder)) == 0 && !strstr(path, "/../"),
               "a file elsewhere is opened");
}

FILE *__wrap_fopen(const char *path, const char *mode)
{
    check_inside(path, strpbrk(mode, "wa+"));
    return __real_fopen(path, mode);
}

int __wrap_open(const char *path, int flags, ...)
{
    check_inside(path, flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC));
    return __real_open(path, flags, 0666);
}

int __wrap_truncate(const char *path, off_t size)
{
    check_inside(path, true);
    return __real_truncate(path, size);
}

/* ---- inputs in processes --------------------------------------------------------------------- */

static jmp_buf ended;
/* the input that the process of a batch has reached, in shared memory */
static volatile uint64_t *reached;

_Noreturn void __real_exit(int status);
_Noreturn void __wrap_exit(int status);

/* Called by die(). Ends the reading of an input, but not the process. */
_Noreturn void __wrap_exit(int status)
{
    if (now)
        longjmp(ended, 1 + status);
    __real_exit(status);
}

/* Called in a new process. Redirects stderr to the file `said`, unless `said` is NULL. */
static void enter_process(const char *said)
{
    dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
    if (said)
        dup2(open(said, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0666), STDERR_FILENO);
    setrlimit(RLIMIT_CPU, &(struct rlimit){ CPU_SECONDS, CPU_SECONDS });
}

/* Reads the input in this process, and returns the exit status. */
static int read_input(Kind *k, const Input *in)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", k->folder, k->file);
    input_write(in, path);
    alarm(SECONDS);
    now = k;
    const int jumped = setjmp(ended);
    if (!jumped)
        k->read();
    now = NULL;
    fflush(NULL);
    return jumped ? jumped - 1 : 0;
}

static int wait_for(pid_t child)
{
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child)
        die("fuzz: no process for an input: %m");
    return status;
}

static int read_alone(Kind *k, const Input *in, const char *said)
{
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        enter_process(said);
        _exit(read_input(k, in));
    }
    return wait_for(child);
}

/* Returns why this output and wait() status of a process are a failure; NULL: no failure. */
static const char *judge(const Kind *k, int status, const char *said)
{
    const char *error = strstr(said, "error: ");
    if (WIFSIGNALED(status))
        return WTERMSIG(status) == SIGXCPU || WTERMSIG(status) == SIGKILL ||
                       WTERMSIG(status) == SIGALRM
                   ? "a hang"
                   : "a crash";
    if (strstr(said, "Sanitizer") || strstr(said, "runtime error"))
        return "a report of the sanitizers";
    if (WEXITSTATUS(status) == BROKEN)
        return "a promise is broken";
    if (strstr(said, "check failed"))
        return "what the program guarantees does not hold";
    if (WEXITSTATUS(status) == 0)
        return NULL;
    if (strstr(said, "FUZZ: is written out") && !strstr(said, "FUZZ: reads again"))
        return "what is written out does not read again";
    if (WEXITSTATUS(status) != 1 || !error)
        return "an end without a message";
    if (!strstr(error, k->folder) && !strstr(error, k->roams ? "--" : "data.paths: ") &&
        !strstr(error, "/config.json: "))
        return "a message without a place";
    return NULL;
}

/* Judges an input by its status and its output, which is in the file `said`. */
static const char *judge_file(const Kind *k, int status, const char *said, Input *message)
{
    *message = input_read(said);
    input_replace(message, message->size, 0, "", 1);
    return judge(k, status, message->data);
}

/* Returns 1 on failure, and keeps the input. name: end of the kept file's name. */
static int try_input(Kind *k, const Input *in, const char *name)
{
    char said[256], kept[256];
    Input message;
    snprintf(said, sizeof said, "%s/said", root);
    const char *why = judge_file(k, read_alone(k, in, said), said, &message);
    if (why) {
        snprintf(kept, sizeof kept, "build/fuzz/%s-%s", k->name, name);
        mkdir("build/fuzz", 0777);
        input_write(in, kept);
        printf("%s: %s; to see it: scripts/fuzz %s %s\n%.1500s\n", kept, why, k->name, kept,
               message.data);
        fflush(stdout);
    }
    input_free(&message);
    return why != NULL;
}

/* Reads many inputs in one process, which is faster. Ends at the first input that may have
 * failed. */
static void read_batch(uint64_t first, uint64_t end)
{
    char said[256];
    snprintf(said, sizeof said, "%s/said", root);
    enter_process(said);
    for (*reached = first; *reached < end; ++*reached) {
        Kind *k = &kinds[*reached % num_kinds];
        Input in = make_input(k, *reached), message;
        if (ftruncate(STDERR_FILENO, 0) != 0)
            _exit(BROKEN);
        if (judge_file(k, read_input(k, &in) << 8, said, &message))
            _exit(BROKEN);
        input_free(&message);
        input_free(&in);
    }
    _exit(0);
}

static int try_kept(void)
{
    int failed = 0;
    glob_t found;
    if (glob("tests/fuzz/*-*", 0, NULL, &found) != 0)
        return 0;
    for (size_t i = 0; i < found.gl_pathc; i++)
        for (int k = 0; k < num_kinds; k++) {
            const char *name = strrchr(found.gl_pathv[i], '/') + 1;
            const size_t n = strlen(kinds[k].name);
            if (strncmp(name, kinds[k].name, n) != 0 || name[n] != '-')
                continue;
            Input in = input_read(found.gl_pathv[i]);
            failed += try_input(&kinds[k], &in, name + n + 1);
            input_free(&in);
            break;
        }
    globfree(&found);
    return failed;
}

static int try_numbers(uint64_t count, uint64_t first)
{
    int failed = 0;
    const uint64_t end = first + count;
    reached =
        mmap(NULL, sizeof *reached, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(reached != MAP_FAILED, "no shared memory");
    while (first < end) {
        fflush(NULL);
        const pid_t child = fork();
        if (child == 0)
            read_batch(first, first + BATCH < end ? first + BATCH : end);
        const int status = wait_for(child);
        first = *reached;
        if (status == 0)
            continue;
        Kind *k = &kinds[first % num_kinds];
        Input in = make_input(k, first);
        char name[32];
        snprintf(name, sizeof name, "%llu", (unsigned long long)first++);
        failed += try_input(k, &in, name);
        input_free(&in);
    }
    return failed;
}

static int try_file(const char *kind, const char *path)
{
    for (int i = 0; i < num_kinds; i++)
        if (strcmp(kinds[i].name, kind) == 0) {
            const Input in = input_read(path);
            const int status = read_alone(&kinds[i], &in, NULL);
            const bool killed = WIFSIGNALED(status);
            printf("%s %d\n", killed ? "signal" : "exit status",
                   killed ? WTERMSIG(status) : WEXITSTATUS(status));
            return 0;
        }
    die("fuzz: there is no kind '%s'", kind);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        die("fuzz: expected COUNT FIRST, or KIND FILE");
    device_init(0);
    root = kinds_make();
    char *end;
    const uint64_t count = strtoull(argv[1], &end, 10);
    int failed = 0;
    if (*end)
        try_file(argv[1], argv[2]);
    else
        failed = try_kept() + try_numbers(count, strtoull(argv[2], NULL, 10));
    if (!*end)
        printf("fuzz: %llu inputs, %d failed\n", (unsigned long long)count, failed);
    kinds_remove();
    return failed > 0;
}
