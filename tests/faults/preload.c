// SPDX-License-Identifier: Apache-2.0
//
// Preloaded library: counts the I/O operations of a process on files under one directory, and lets
// the n-th of them fail, fall short or come late; or refuses the n-th piece of memory. What it
// wraps are the functions through which the package and Python reach the kernel. Of io_uring it
// changes the n-th entry before it is submitted, so that the kernel itself completes it as asked:
//   error, 0 bytes, short   an empty request with that result (Linux 6.10); of a short one some
//   bytes are moved before late                    a read from a pipe, which a thread fills when it
//   has moved the bytes, some time later
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum effect { NONE, ERROR, SHORT, ZERO, LATE, NO_MEMORY };
enum { NUM_RINGS = 64, NOP_RESULT = 1, DIRECT = 4096 };

// ---- the order, and what came of it
// -------------------------------------------------------------------------------

static char watched[4096];
static atomic_long num_seen, num_transfers, num_mappings, armed_at;
static enum effect armed_effect;
static int armed_errno;
static double armed_secs;
static char hit[8192];

void faults_watch(const char* directory)
{
    snprintf(watched, sizeof watched, "%s/", directory);
}

static void forget_late(void);

// The operation number `n` (from 0) of those that come from now on, of transfers alone for what
// only they can be; -1 for none. What was late must have ended.
void faults_arm(long n, int effect, int error, double secs)
{
    forget_late();
    armed_at = -1;
    num_seen = num_transfers = num_mappings = 0;
    armed_effect = effect;
    armed_errno = error;
    armed_secs = secs;
    hit[0] = 0;
    armed_at = n;
}

// Of those that can be struck so.
long faults_seen(int effect)
{
    return effect == NO_MEMORY                 ? num_mappings
           : effect == SHORT || effect == ZERO ? num_transfers
                                               : num_seen;
}

// "" or which operation it was: name, offset, bytes, file.
const char* faults_hit(void)
{
    return hit;
}

static void wait_secs(double secs)
{
    const struct timespec left = {(time_t)secs, (long)((secs - (double)(time_t)secs) * 1e9)};
    nanosleep(&left, NULL);
}

static int is_watched(const char* path)
{
    return watched[0] && strncmp(path, watched, strlen(watched)) == 0;
}

static enum effect count_path(const char* name, const char* path, long offset, size_t num_bytes)
{
    if (!is_watched(path)) return NONE;
    const long place = atomic_fetch_add(&num_seen, 1);
    const long place_of_transfer = num_bytes > 0 ? atomic_fetch_add(&num_transfers, 1) : -2;
    if (armed_effect == NO_MEMORY) return NONE;
    const int of_transfers = armed_effect == SHORT || armed_effect == ZERO;
    if ((of_transfers ? place_of_transfer : place) != atomic_load(&armed_at)) return NONE;
    snprintf(hit, sizeof hit, "%s %ld %zu %s", name, offset, num_bytes, path);
    return armed_effect;
}

static int path_of(int dir_fd, const char* name, char* path, size_t size)
{
    char link[64];
    ssize_t length = 0;
    if (!name || name[0] != '/') {
        if (name && dir_fd == AT_FDCWD) return 0;
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir_fd);
        length = readlink(link, path, size - 1);
        if (length <= 0) return 0;
    }
    path[length] = 0;
    if (name) snprintf(path + length, size - (size_t)length, "%s%s", length ? "/" : "", name);
    return 1;
}

static enum effect count(const char* what, int fd, const char* name, long offset, size_t num_bytes)
{
    char path[8000];
    const int error = errno;
    const enum effect found = watched[0] && path_of(fd, name, path, sizeof path)
                                  ? count_path(what, path, offset, num_bytes)
                                  : NONE;
    errno = error;
    return found;
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void* real(const char* name)
{
    return dlsym(RTLD_NEXT, name);
}

// ---- transfers
// ----------------------------------------------------------------------------------------------------

// What a short transfer moves, and what it says that it has moved: a device may stop inside of a
// block.
static size_t short_bytes(size_t num_bytes)
{
    const size_t half = num_bytes / 2 / DIRECT * DIRECT;
    return half ? half : num_bytes;
}

static ssize_t short_result(ssize_t moved)
{
    return moved > 512 ? moved - 512 : moved > 1 ? moved / 2 : moved;
}

#define TRANSFER(shortly, num_bytes, call_with, what, fd, offset) \
    switch (count(what, fd, NULL, offset, num_bytes)) {           \
        case ERROR:                                               \
            errno = armed_errno;                                  \
            return -1;                                            \
        case ZERO:                                                \
            return 0;                                             \
        case SHORT:                                               \
            return shortly(num_bytes);                            \
        case LATE:                                                \
            wait_secs(armed_secs);                                \
            break;                                                \
        case NO_MEMORY:                                           \
        case NONE:                                                \
            break;                                                \
    }                                                             \
    return call_with(num_bytes);

#define WRAP_AT(name, pointer)                                       \
    ssize_t name(int fd, pointer buffer, size_t num_bytes, off_t at) \
    {                                                                \
        const __typeof__(&name) next = REAL(name);                   \
        TRANSFER(SHORTLY_AT, num_bytes, CALL_AT, #name, fd, at)      \
    }
#define CALL_AT(size) next(fd, buffer, size, at)
#define SHORTLY_AT(size) short_result(CALL_AT(short_bytes(size)))
WRAP_AT(pread, void*)
WRAP_AT(pread64, void*)
WRAP_AT(pwrite, const void*)
WRAP_AT(pwrite64, const void*)

#define WRAP(name, pointer)                                \
    ssize_t name(int fd, pointer buffer, size_t num_bytes) \
    {                                                      \
        const __typeof__(&name) next = REAL(name);         \
        TRANSFER(SHORTLY, num_bytes, CALL, #name, fd, -1)  \
    }
#define CALL(size) next(fd, buffer, size)
// The file has a place of its own: what is moved is said.
#define SHORTLY(size) CALL((size) > 1 ? (size) / 2 : (size))
WRAP(read, void*)
WRAP(write, const void*)

// ---- the rest: an error, or late
// ----------------------------------------------------------------------------------

#define GUARD(what, fd, name)                                   \
    do {                                                        \
        const enum effect found = count(what, fd, name, -1, 0); \
        if (found == LATE) wait_secs(armed_secs);               \
        if (found == ERROR) {                                   \
            errno = armed_errno;                                \
            return -1;                                          \
        }                                                       \
    } while (0)

int fsync(int fd)
{
    GUARD("fsync", fd, NULL);
    return REAL(fsync)(fd);
}

int fdatasync(int fd)
{
    GUARD("fdatasync", fd, NULL);
    return REAL(fdatasync)(fd);
}

int fallocate(int fd, int mode, off_t offset, off_t num_bytes)
{
    GUARD("fallocate", fd, NULL);
    return REAL(fallocate)(fd, mode, offset, num_bytes);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t num_bytes)
{
    GUARD("fallocate", fd, NULL);
    return REAL(fallocate64)(fd, mode, offset, num_bytes);
}

int ftruncate64(int fd, off64_t num_bytes)
{
    GUARD("ftruncate", fd, NULL);
    return REAL(ftruncate64)(fd, num_bytes);
}

int rename(const char* from, const char* to)
{
    GUARD("rename", AT_FDCWD, from);
    return REAL(rename)(from, to);
}

int renameat(int from_fd, const char* from, int to_fd, const char* to)
{
    GUARD("renameat", from_fd, from);
    return REAL(renameat)(from_fd, from, to_fd, to);
}

int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags)
{
    GUARD("renameat2", from_fd, from);
    return REAL(renameat2)(from_fd, from, to_fd, to, flags);
}

int unlinkat(int fd, const char* name, int flags)
{
    GUARD("unlinkat", fd, name);
    return REAL(unlinkat)(fd, name, flags);
}

int mkdirat(int fd, const char* name, mode_t mode)
{
    GUARD("mkdirat", fd, name);
    return REAL(mkdirat)(fd, name, mode);
}

int unlink(const char* name)
{
    GUARD("unlink", AT_FDCWD, name);
    return REAL(unlink)(name);
}

int mkdir(const char* name, mode_t mode)
{
    GUARD("mkdir", AT_FDCWD, name);
    return REAL(mkdir)(name, mode);
}

#define WRAP_OPEN(symbol)                                     \
    int symbol(int fd, const char* name, int flags, ...)      \
    {                                                         \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        const mode_t mode = (mode_t)va_arg(rest, int);        \
        va_end(rest);                                         \
        GUARD(flags & O_CREAT ? "create" : "open", fd, name); \
        return REAL(symbol)(fd, name, flags, mode);           \
    }
WRAP_OPEN(openat)
WRAP_OPEN(openat64)

#define WRAP_OPEN_HERE(symbol)                                      \
    int symbol(const char* name, int flags, ...)                    \
    {                                                               \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        const mode_t mode = (mode_t)va_arg(rest, int);              \
        va_end(rest);                                               \
        GUARD(flags & O_CREAT ? "create" : "open", AT_FDCWD, name); \
        return REAL(symbol)(name, flags, mode);                     \
    }
WRAP_OPEN_HERE(open)
WRAP_OPEN_HERE(open64)

// ---- memory: anonymous mappings, and the kernel's registration of some
// ---------------------------------------------

static int is_refused(const char* what, size_t num_bytes)
{
    if (!watched[0] || atomic_fetch_add(&num_mappings, 1) != atomic_load(&armed_at)) return 0;
    if (armed_effect != NO_MEMORY) return 0;
    snprintf(hit, sizeof hit, "%s -1 %zu memory", what, num_bytes);
    errno = ENOMEM;
    return 1;
}

// Of the core and of Python's module alone: an interpreter without memory for its own stack cannot
// tell anybody.
static int is_ours(const void* caller)
{
    Dl_info found;
    return dladdr(caller, &found) && found.dli_fname &&
           (strstr(found.dli_fname, "fuyou_core") || strstr(found.dli_fname, "/mmap."));
}

#define WRAP_MMAP(symbol)                                                                      \
    void* symbol(void* address, size_t num_bytes, int protection, int flags, int fd, off_t at) \
    {                                                                                          \
        if (flags & MAP_ANONYMOUS && watched[0] && is_ours(__builtin_return_address(0)) &&     \
            is_refused("mmap", num_bytes))                                                     \
            return MAP_FAILED;                                                                 \
        return REAL(symbol)(address, num_bytes, protection, flags, fd, at);                    \
    }
WRAP_MMAP(mmap)
WRAP_MMAP(mmap64)

// ---- io_uring
// -----------------------------------------------------------------------------------------------------

struct ring {
    int fd;
    unsigned seen;  // entries before this one are counted
    void* base;
    size_t base_bytes;
    struct io_uring_sqe* entries;
    size_t entries_bytes;
    struct io_sqring_offsets at;
};
static struct ring rings[NUM_RINGS];
static pthread_mutex_t rings_mutex = PTHREAD_MUTEX_INITIALIZER;

static long kernel(long number, long a, long b, long c, long d, long e, long f)
{
    return REAL(syscall)(number, a, b, c, d, e, f);
}

static void keep_ring(int fd, const struct io_uring_params* params)
{
    struct ring ring = {.fd = fd, .at = params->sq_off};
    ring.base_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    ring.entries_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring.base =
        mmap(NULL, ring.base_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    ring.entries =
        mmap(NULL, ring.entries_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQES);
    if (ring.base == MAP_FAILED || ring.entries == MAP_FAILED) abort();
    pthread_mutex_lock(&rings_mutex);
    int i = 0;
    while (i < NUM_RINGS && rings[i].base) ++i;
    if (i == NUM_RINGS) abort();
    rings[i] = ring;
    pthread_mutex_unlock(&rings_mutex);
}

static struct ring* ring_of(int fd)
{
    struct ring* found = NULL;
    pthread_mutex_lock(&rings_mutex);
    for (int i = 0; i < NUM_RINGS && !found; ++i)
        if (rings[i].base && rings[i].fd == fd) found = &rings[i];
    pthread_mutex_unlock(&rings_mutex);
    return found;
}

int close(int fd)
{
    struct ring* ring = ring_of(fd);
    if (ring) {
        munmap(ring->base, ring->base_bytes);
        munmap(ring->entries, ring->entries_bytes);
        ring->base = NULL;
    }
    return REAL(close)(fd);
}

static ssize_t move(int is_read, const struct io_uring_sqe* entry, void* buffer, size_t num_bytes)
{
    return is_read ? REAL(pread64)(entry->fd, buffer, num_bytes, (off64_t)entry->off)
                   : REAL(pwrite64)(entry->fd, buffer, num_bytes, (off64_t)entry->off);
}

struct late {
    struct io_uring_sqe entry;
    int is_read, to_fd, from_fd;
    double secs;
    char* between;
};
static struct late* last_late;

// The read from the pipe may end after the thread that fills it, so all this stays until the next
// order.
static void forget_late(void)
{
    if (!last_late) return;
    REAL(close)(last_late->from_fd);
    free(last_late->between);
    free(last_late);
    last_late = NULL;
}

static void* move_late(void* given)
{
    struct late* late = given;
    wait_secs(late->secs);
    void* buffer = late->is_read ? late->between : (void*)(uintptr_t)late->entry.addr;
    const ssize_t moved = move(late->is_read, &late->entry, buffer, late->entry.len);
    if (moved > 0 && REAL(write)(late->to_fd, late->between, (size_t)moved) != moved) abort();
    REAL(close)(late->to_fd);
    return NULL;
}

static void make_late(struct io_uring_sqe* entry, int is_read)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) || fcntl(ends[1], F_SETPIPE_SZ, 1 << 20) < (int)entry->len) abort();
    char* between = aligned_alloc(DIRECT, (entry->len / DIRECT + 1) * DIRECT);
    struct late* late = last_late = calloc(1, sizeof *late);
    *late = (struct late){*entry, is_read, ends[1], ends[0], armed_secs, between};
    if (!is_read)
        entry->addr = (uintptr_t)late->between;  // what comes out of the pipe is of no use
    entry->opcode = IORING_OP_READ;
    entry->fd = ends[0];
    entry->off = 0;
    entry->buf_index = 0;
    pthread_t thread;
    if (pthread_create(&thread, NULL, move_late, late)) abort();
    pthread_detach(thread);
}

static void answer(struct io_uring_sqe* entry, int result)
{
    const unsigned long long tag = entry->user_data;
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_NOP;
    entry->fd = -1;
    entry->rw_flags = NOP_RESULT;
    entry->len = (unsigned)result;
    entry->user_data = tag;
}

static void change(struct io_uring_sqe* entry)
{
    const int is_read = entry->opcode == IORING_OP_READ || entry->opcode == IORING_OP_READ_FIXED;
    if (!is_read && entry->opcode != IORING_OP_WRITE && entry->opcode != IORING_OP_WRITE_FIXED)
        return;
    switch (count(is_read ? "uring_read" : "uring_write", entry->fd, NULL, (long)entry->off,
                  entry->len)) {
        case ERROR:
            answer(entry, -armed_errno);
            break;
        case ZERO:
            answer(entry, 0);
            break;
        case SHORT: {
            const ssize_t moved =
                move(is_read, entry, (void*)(uintptr_t)entry->addr, short_bytes(entry->len));
            answer(entry, (int)(moved < 0 ? -errno : short_result(moved)));
            break;
        }
        case LATE:
            make_late(entry, is_read);
            break;
        case NO_MEMORY:
        case NONE:
            break;
    }
}

static void look_at_entries(struct ring* ring)
{
    char* base = ring->base;
    const unsigned mask = *(unsigned*)(base + ring->at.ring_mask),
                   tail = *(unsigned*)(base + ring->at.tail);
    const unsigned* array = (unsigned*)(base + ring->at.array);
    for (; ring->seen != tail; ++ring->seen) change(&ring->entries[array[ring->seen & mask]]);
}

long syscall(long number, ...)
{
    va_list rest;
    va_start(rest, number);
    long a[6];
    for (int i = 0; i < 6; ++i) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_uring_register && is_refused("io_uring_register", 0)) return -1;
    if (number == SYS_io_uring_enter) {
        struct ring* ring = ring_of((int)a[0]);
        if (ring) look_at_entries(ring);
    }
    const long result = kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == SYS_io_uring_setup && result >= 0) {
        keep_ring((int)result, (const struct io_uring_params*)a[1]);
    }
    return result;
}
