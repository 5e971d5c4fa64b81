// The machine's memory bandwidth: a read and a copy by several threads, each on its own part of the buffers.

#define _GNU_SOURCE  // madvise

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { kMostThreads = 256 };

struct part {
    const char *from;
    char *to;  // NULL: read only
    size_t bytes;
    uint64_t sum;
};

// Four streams, which the hardware's prefetchers follow side by side: faster than one, whatever the pages.
static uint64_t read_all(const char *from, size_t bytes) {
    typedef uint64_t line __attribute__((vector_size(64), aligned(64)));
    const line *lines = (const line *)from;
    const size_t quarter = bytes / sizeof(line) / 4;
    line a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i < quarter; ++i) {
        a += lines[i], b += lines[i + quarter], c += lines[i + 2 * quarter], d += lines[i + 3 * quarter];
    }
    a += b + c + d;
    return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

static void *work(void *argument) {
    struct part *part = argument;
    if (part->to == NULL) {
        part->sum = read_all(part->from, part->bytes);
    } else {
        memcpy(part->to, part->from, part->bytes);
    }
    return NULL;
}

// Memory, on huge pages if requested and granted, and touched: reads must not hit the shared page of zeros.
void *memory_new(size_t bytes, int huge) {
    void *memory = NULL;
    if (posix_memalign(&memory, 1 << 21, bytes) != 0) {
        return NULL;
    }
    if (huge) {
        madvise(memory, bytes, MADV_HUGEPAGE);
    }
    memset(memory, 1, bytes);
    return memory;
}

void memory_free(void *memory) { free(memory); }

// Read `from`, or copy it to `to`; return the seconds that took, or a negative number. Bytes: a multiple of
// 256 * threads, or up to one such multiple less one is left out.
double memory_pass(void *to, const void *from, size_t bytes, int threads) {
    pthread_t running[kMostThreads];
    struct part parts[kMostThreads];
    if (threads < 1 || threads > kMostThreads) {
        return -1;
    }
    size_t each = bytes / 256 / threads * 256;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = threads - 1; i >= 0; --i) {
        parts[i] = (struct part){(const char *)from + i * each, to == NULL ? NULL : (char *)to + i * each, each, 0};
        if (i == 0) {
            work(&parts[0]);
        } else if (pthread_create(&running[i], NULL, work, &parts[i]) != 0) {
            return -1;
        }
    }
    uint64_t sum = parts[0].sum;
    for (int i = 1; i < threads; ++i) {
        pthread_join(running[i], NULL);
        sum += parts[i].sum;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    // The sum is used, or the compiler would remove the reads.
    return sum == 42 ? -1 : (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}
