/* Records what a process does to the files of one folder, for `replay.py`.

   gcc -shared -fPIC -o recorder.so recorder.c -ldl -lpthread
   LD_PRELOAD=recorder.so POWER_ROOT=/folder POWER_LOG=/log POWER_ACKS=/acks program

   Every change of a file below POWER_ROOT, every fsync there and every write to POWER_ACKS is a
   record of POWER_LOG. An fsync is recorded and not carried out: the replay decides what it keeps.
   Files are named by their inodes. What the C library writes for a FILE, and calls that are rare,
   are recorded by the whole content afterwards ('X'). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static int log_file = -1;
static char root[PATH_MAX], acks[PATH_MAX];
static pthread_mutex_t mutex;

/* The header of a record; two names and the data follow it. */
struct record {
  uint64_t kind, a, b, first_name, second_name, data;
};

struct place { /* a name in a folder */
  char parent[PATH_MAX + 1], name[NAME_MAX + 1];
  uint64_t parent_inode;
};

static int (*real_openat)(int, const char *, int, ...);
static ssize_t (*real_write)(int, const void *, size_t);

__attribute__((constructor)) static void start(void) {
  pthread_mutexattr_t recursive;
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&mutex, &recursive);
  real_openat = REAL(int, openat, int, const char *, int, ...);
  real_write = REAL(ssize_t, write, int, const void *, size_t);
  const char *names[] = {getenv("POWER_ROOT"), getenv("POWER_LOG"), getenv("POWER_ACKS")};
  if (!names[0] || !names[1] || !names[2] || !realpath(names[0], root)) return;
  snprintf(acks, sizeof acks, "%s", names[2]);
  log_file = real_openat(AT_FDCWD, names[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static void record(char kind, uint64_t a, uint64_t b, const char *first, const char *second,
                   const void *data, size_t size) {
  struct record head = {kind, a, b, first ? strlen(first) : 0, second ? strlen(second) : 0, size};
  size_t total = sizeof head + head.first_name + head.second_name + size;
  char *buffer = malloc(total), *end = buffer;
  end = mempcpy(end, &head, sizeof head);
  end = mempcpy(end, first ? first : "", head.first_name);
  end = mempcpy(end, second ? second : "", head.second_name);
  memcpy(end, data ? data : "", size);
  if (real_write(log_file, buffer, total) != (ssize_t)total) abort();
  free(buffer);
}

static int is_inside(const char *path) {
  size_t length = strlen(root);
  return !strncmp(path, root, length) && (!path[length] || path[length] == '/');
}

/* Whether a descriptor is of a file or folder that is recorded; 2 for the acknowledgements. */
static int is_recorded(int fd, struct stat *status) {
  char link[64], path[PATH_MAX + 1];
  if (log_file < 0 || fd == log_file || fstat(fd, status)) return 0;
  if (!S_ISREG(status->st_mode) && !S_ISDIR(status->st_mode)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX);
  if (length < 0) return 0;
  path[length] = 0;
  return !strcmp(path, acks) ? 2 : is_inside(path);
}

static int locate(int folder, const char *path, struct place *place) {
  char absolute[2 * PATH_MAX + 2], base[PATH_MAX + 1] = "", link[64];
  if (log_file < 0) return 0;
  if (path[0] != '/') {
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t n = readlink(folder == AT_FDCWD ? "/proc/self/cwd" : link, base, PATH_MAX);
    if (n < 0) return 0;
    base[n] = 0;
  }
  snprintf(absolute, sizeof absolute, "%s/%s", base, path);
  for (size_t n = strlen(absolute); n > 1 && absolute[n - 1] == '/'; n--) absolute[n - 1] = 0;
  char *slash = strrchr(absolute, '/');
  snprintf(place->name, sizeof place->name, "%s", slash + 1);
  *slash = 0;
  struct stat status;
  if (!realpath(*absolute ? absolute : "/", place->parent) || !is_inside(place->parent)) return 0;
  if (stat(place->parent, &status)) return 0;
  place->parent_inode = status.st_ino;
  return 1;
}

static int inode_of(int folder, const char *path, struct stat *status) {
  return !fstatat(folder, path, status, 0);
}

static void whole(int fd, struct stat *status) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  int copy = real_openat(AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
  if (copy < 0 || fstat(copy, status)) return;
  char *content = malloc(status->st_size + 1);
  ssize_t size = pread(copy, content, status->st_size, 0);
  record('X', status->st_ino, 0, NULL, NULL, content, size < 0 ? 0 : size);
  free(content);
  close(copy);
}

#define LOCK int saved_errno; pthread_mutex_lock(&mutex)
#define UNLOCK saved_errno = errno; pthread_mutex_unlock(&mutex); errno = saved_errno

static void created(int before, const struct stat *old, struct place *place, int fd, int empties) {
  struct stat status;
  if (fstat(fd, &status)) return;
  if (!before) record('C', place->parent_inode, status.st_ino, place->name, NULL, NULL, 0);
  else if (empties && S_ISREG(old->st_mode) && old->st_size) record('T', old->st_ino, 0, NULL, NULL, NULL, 0);
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
  struct place place;
  struct stat old;
  if (!(flags & (O_CREAT | O_TRUNC))) return real_openat(folder, path, flags, mode);
  LOCK;
  int inside = locate(folder, path, &place), before = inside && inode_of(folder, path, &old);
  int fd = real_openat(folder, path, flags, mode);
  if (fd >= 0 && inside) created(before, &old, &place, fd, flags & O_TRUNC);
  UNLOCK;
  return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags | O_LARGEFILE, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

FILE *fopen64(const char *path, const char *mode) {
  struct place place;
  struct stat old;
  LOCK;
  int inside = mode[0] != 'r' && locate(AT_FDCWD, path, &place);
  int before = inside && inode_of(AT_FDCWD, path, &old);
  FILE *file = REAL(FILE *, fopen64, const char *, const char *)(path, mode);
  if (file && inside) created(before, &old, &place, fileno(file), mode[0] == 'w');
  UNLOCK;
  return file;
}
FILE *fopen(const char *path, const char *mode) { return fopen64(path, mode); }

static void flushed(FILE *file) {
  struct stat status;
  int fd = fileno(file);
  if (fd >= 0 && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && is_recorded(fd, &status) == 1) whole(fd, &status);
}
int fflush(FILE *file) {
  LOCK;
  int result = REAL(int, fflush, FILE *)(file);
  if (file) flushed(file);
  UNLOCK;
  return result;
}
int fclose(FILE *file) {
  LOCK;
  fflush(file);
  int result = REAL(int, fclose, FILE *)(file);
  UNLOCK;
  return result;
}

static void wrote(int fd, const void *data, ssize_t size, off_t offset) {
  struct stat status;
  int kind = size > 0 ? is_recorded(fd, &status) : 0;
  if (kind == 2) record('A', 0, 0, NULL, NULL, data, size);
  if (kind != 1) return;
  if (offset < 0) offset = lseek(fd, 0, SEEK_CUR) - size;
  record('W', status.st_ino, offset, NULL, NULL, data, size);
}
ssize_t write(int fd, const void *data, size_t size) {
  if (log_file < 0) return real_write ? real_write(fd, data, size) : REAL(ssize_t, write, int, const void *, size_t)(fd, data, size);
  LOCK;
  ssize_t written = real_write(fd, data, size);
  wrote(fd, data, written, -1);
  UNLOCK;
  return written;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  LOCK;
  ssize_t written = REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(fd, data, size, offset);
  wrote(fd, data, written, offset);
  UNLOCK;
  return written;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

#define THEN_WHOLE(type, name, fd, arguments, ...) \
  type name(__VA_ARGS__) { \
    struct stat status; \
    LOCK; \
    type result = REAL(type, name, __VA_ARGS__) arguments; \
    if (is_recorded(fd, &status) == 1 && S_ISREG(status.st_mode)) whole(fd, &status); \
    UNLOCK; \
    return result; \
  }
THEN_WHOLE(ssize_t, writev, fd, (fd, v, n), int fd, const struct iovec *v, int n)
THEN_WHOLE(ssize_t, pwritev, fd, (fd, v, n, o), int fd, const struct iovec *v, int n, off_t o)
THEN_WHOLE(ssize_t, pwritev64, fd, (fd, v, n, o), int fd, const struct iovec *v, int n, off64_t o)
THEN_WHOLE(ssize_t, sendfile, fd, (fd, from, o, n), int fd, int from, off_t *o, size_t n)
THEN_WHOLE(ssize_t, sendfile64, fd, (fd, from, o, n), int fd, int from, off64_t *o, size_t n)
THEN_WHOLE(ssize_t, copy_file_range, to, (from, a, to, b, n, f), int from, off64_t *a, int to, off64_t *b, size_t n, unsigned f)

#define THEN_SIZE(name, arguments, ...) \
  int name(__VA_ARGS__) { \
    struct stat before, after; \
    LOCK; \
    int inside = is_recorded(fd, &before) == 1, result = REAL(int, name, __VA_ARGS__) arguments; \
    if (inside && !fstat(fd, &after) && after.st_size != before.st_size) \
      record('T', after.st_ino, after.st_size, NULL, NULL, NULL, 0); \
    UNLOCK; \
    return result; \
  }
THEN_SIZE(ftruncate, (fd, size), int fd, off_t size)
THEN_SIZE(ftruncate64, (fd, size), int fd, off64_t size)
THEN_SIZE(fallocate, (fd, mode, offset, size), int fd, int mode, off_t offset, off_t size)
THEN_SIZE(posix_fallocate, (fd, offset, size), int fd, off_t offset, off_t size)
THEN_SIZE(posix_fallocate64, (fd, offset, size), int fd, off64_t offset, off64_t size)

int fsync(int fd) {
  struct stat status;
  LOCK;
  int inside = is_recorded(fd, &status) == 1;
  if (inside) record('F', status.st_ino, 0, NULL, NULL, NULL, 0);
  UNLOCK;
  return inside ? 0 : REAL(int, fsync, int)(fd);
}
int fdatasync(int fd) { return fsync(fd); }

int mkdirat(int folder, const char *path, mode_t mode) {
  struct place place;
  struct stat status;
  LOCK;
  int result = REAL(int, mkdirat, int, const char *, mode_t)(folder, path, mode);
  if (!result && locate(folder, path, &place) && inode_of(folder, path, &status))
    record('D', place.parent_inode, status.st_ino, place.name, NULL, NULL, 0);
  UNLOCK;
  return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int folder, const char *path, int flags) {
  struct place place;
  LOCK;
  int inside = locate(folder, path, &place);
  int result = REAL(int, unlinkat, int, const char *, int)(folder, path, flags);
  if (!result && inside) record('U', place.parent_inode, 0, place.name, NULL, NULL, 0);
  UNLOCK;
  return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
  struct stat status;
  return lstat(path, &status) ? -1 : S_ISDIR(status.st_mode) ? rmdir(path) : unlink(path);
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
  struct place place;
  struct stat status;
  LOCK;
  int result = REAL(int, linkat, int, const char *, int, const char *, int)(from, old, to, new, flags);
  if (!result && locate(to, new, &place) && inode_of(to, new, &status))
    record('L', place.parent_inode, status.st_ino, place.name, NULL, NULL, 0);
  UNLOCK;
  return result;
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

/* Between the folder and another place a rename cannot be replayed: the process ends. */
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  struct place places[2];
  LOCK;
  int inside = locate(from, old, &places[0]) + 2 * locate(to, new, &places[1]);
  int result = REAL(int, renameat2, int, const char *, int, const char *, unsigned)(from, old, to, new, flags);
  if (!result && inside == 3)
    record('R', places[0].parent_inode, places[1].parent_inode, places[0].name, places[1].name, NULL, 0);
  if (!result && (inside == 1 || inside == 2 || (inside && flags & RENAME_EXCHANGE))) abort();
  UNLOCK;
  return result;
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }
