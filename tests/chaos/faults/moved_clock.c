/* The wall clock of one process, moved: preloaded, it adds the seconds in a file to what clocks say.
 *
 * The file (CHAOS_CLOCK_FILE) has one int64_t and is mapped, so a write moves the clock at once. Waits
 * until a time of the wall clock are told the true time; they do not notice a jump while they last.
 * Clocks that only go forward (CLOCK_MONOTONIC) stay as they are, as when somebody sets the date.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const time_t A_DATE = 1000000000; /* other clocks count from the start of the machine */
static const int64_t still = 0;
static volatile const int64_t *offset = &still;

__attribute__((constructor)) static void open_clock(void) {
  const char *path = getenv("CHAOS_CLOCK_FILE");
  int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) offset = page;
  close(file);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
  static __typeof__(&clock_gettime) next;
  if (next == NULL) next = NEXT(clock_gettime);
  int failed = next(clock, now);
  if (failed == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += *offset;
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}

static struct timespec in_truth(const struct timespec *until) {
  struct timespec real = *until;
  if (real.tv_sec > A_DATE) real.tv_sec -= *offset;
  return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static __typeof__(&pthread_cond_timedwait) next;
  /* An older version of it, for programs of another age, would be found first. */
  if (next == NULL)
    next = (__typeof__(next))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (next == NULL) next = NEXT(pthread_cond_timedwait);
  struct timespec real = in_truth(until);
  return next(condition, mutex, &real);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           clockid_t clock, const struct timespec *restrict until) {
  struct timespec real = in_truth(until);
  return NEXT(pthread_cond_clockwait)(condition, mutex, clock, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
  struct timespec real = in_truth(until);
  return NEXT(pthread_mutex_timedlock)(mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  struct timespec real = in_truth(until);
  return NEXT(sem_timedwait)(semaphore, &real);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
  struct timespec real = in_truth(until);
  return NEXT(sem_clockwait)(semaphore, clock, &real);
}
