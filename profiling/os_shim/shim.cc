// Counts the calls to the operating system that a training step should not make: LD_PRELOAD this library, and ask it.
//
// It stands before libc's functions of the same names. What libc does inside itself (an allocator that maps memory, a mutex
// that waits) and libraries with system calls of their own do not pass here; context switches and page faults, which the kernel
// counts (getrusage), see those too.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace {

enum Counter { kFileOpens, kSleeps, kFutexWaits, kMaps, kUnmaps, kCounters };
std::atomic<std::int64_t> counts[kCounters];

void Count(Counter counter) { counts[counter].fetch_add(1, std::memory_order_relaxed); }

template <typename Function>
Function* Next(std::atomic<Function*>& kept, const char* name) {
  Function* next = kept.load(std::memory_order_relaxed);
  if (next == nullptr) {
    next = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
    kept.store(next, std::memory_order_relaxed);
  }
  return next;
}

// A system call without libc's `syscall`, which is one of the functions counted here.
long Raw(long number, long a, long b, long c, long d, long e, long f) {
  long result = number;
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  asm volatile("syscall" : "+a"(result) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
  if (result < 0 && result > -4096) {
    errno = static_cast<int>(-result);
    return -1;
  }
  return result;
}

mode_t ModeOf(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

#define MOESAIC_EXPORT extern "C" __attribute__((visibility("default")))
#define MOESAIC_NEXT(name)                                   \
  Next(                                                      \
      *[] {                                                  \
        static std::atomic<decltype(::name)*> kept{nullptr}; \
        return &kept;                                        \
      }(),                                                   \
      #name)

/// Writes the counts since the process began, in the order of `Counter`, and returns how many there are.
MOESAIC_EXPORT int moesaic_os_counts(std::int64_t* out) {
  for (int i = 0; i < kCounters; ++i) out[i] = counts[i].load(std::memory_order_relaxed);
  return kCounters;
}

MOESAIC_EXPORT int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  Count(kFileOpens);
  return MOESAIC_NEXT(open)(path, flags, mode);
}
MOESAIC_EXPORT int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  Count(kFileOpens);
  return MOESAIC_NEXT(open64)(path, flags, mode);
}
MOESAIC_EXPORT int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  Count(kFileOpens);
  return MOESAIC_NEXT(openat)(folder, path, flags, mode);
}
MOESAIC_EXPORT int openat64(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  Count(kFileOpens);
  return MOESAIC_NEXT(openat64)(folder, path, flags, mode);
}
MOESAIC_EXPORT FILE* fopen(const char* path, const char* mode) {
  Count(kFileOpens);
  return MOESAIC_NEXT(fopen)(path, mode);
}
MOESAIC_EXPORT FILE* fopen64(const char* path, const char* mode) {
  Count(kFileOpens);
  return MOESAIC_NEXT(fopen64)(path, mode);
}

MOESAIC_EXPORT int nanosleep(const timespec* wanted, timespec* left) {
  Count(kSleeps);
  return MOESAIC_NEXT(nanosleep)(wanted, left);
}
MOESAIC_EXPORT int clock_nanosleep(clockid_t clock, int flags, const timespec* wanted, timespec* left) {
  Count(kSleeps);
  return MOESAIC_NEXT(clock_nanosleep)(clock, flags, wanted, left);
}
MOESAIC_EXPORT int usleep(useconds_t time) {
  Count(kSleeps);
  return MOESAIC_NEXT(usleep)(time);
}
MOESAIC_EXPORT unsigned sleep(unsigned seconds) {
  Count(kSleeps);
  return MOESAIC_NEXT(sleep)(seconds);
}

MOESAIC_EXPORT void* mmap(void* address, size_t size, int protection, int flags, int file, off_t offset) noexcept {
  Count(kMaps);
  return reinterpret_cast<void*>(
      Raw(SYS_mmap, reinterpret_cast<long>(address), static_cast<long>(size), protection, flags, file, offset));
}
MOESAIC_EXPORT void* mmap64(void* address, size_t size, int protection, int flags, int file, off_t offset) noexcept {
  return mmap(address, size, protection, flags, file, offset);
}
MOESAIC_EXPORT int munmap(void* address, size_t size) noexcept {
  Count(kUnmaps);
  return static_cast<int>(Raw(SYS_munmap, reinterpret_cast<long>(address), static_cast<long>(size), 0, 0, 0, 0));
}

MOESAIC_EXPORT long syscall(long number, ...) noexcept {
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (long& value : a) value = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_futex && ((a[1] & 0x7f) == 0 || (a[1] & 0x7f) == 9)) Count(kFutexWaits);  // FUTEX_WAIT, FUTEX_WAIT_BITSET
  if (number == SYS_nanosleep || number == SYS_clock_nanosleep) Count(kSleeps);
  if (number == SYS_openat || number == SYS_open) Count(kFileOpens);
  if (number == SYS_mmap) Count(kMaps);
  if (number == SYS_munmap) Count(kUnmaps);
  return Raw(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
