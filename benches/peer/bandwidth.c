/* Prints the machine's read bandwidth in GB/s: the best of eight passes of N threads over 1 GiB. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_THREADS = 256, PASSES = 8 };
static const size_t BYTES = (size_t)1 << 30;

struct part {
    const uint64_t *words;
    size_t count;
    uint64_t sum;
};

/* Keeps four sums, so that no addition waits for another one. The compiler vectorizes them. */
static void *read_part(void *argument) {
    struct part *part = argument;
    uint64_t sums[4] = {0};
    for (size_t i = 0; i + 32 <= part->count; i += 32) {
        __builtin_prefetch(part->words + i + 512);
        for (size_t j = 0; j < 32; j++) sums[j % 4] += part->words[i + j];
    }
    part->sum = sums[0] + sums[1] + sums[2] + sums[3];
    return NULL;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

int main(int count, char **arguments) {
    int threads = count == 2 ? atoi(arguments[1]) : 0;
    if (threads < 1 || threads > MAX_THREADS) {
        fprintf(stderr, "usage: bandwidth THREADS\n");
        return 2;
    }
    uint64_t *words = aligned_alloc(4096, BYTES);
    if (words == NULL) return 1;
    memset(words, 1, BYTES);
    struct part parts[MAX_THREADS];
    pthread_t running[MAX_THREADS];
    double best = 0;
    uint64_t sum = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        double start = now();
        for (int i = 0; i < threads; i++) {
            size_t each = BYTES / 8 / (size_t)threads;
            parts[i] = (struct part){words + each * (size_t)i, each, 0};
            if (pthread_create(&running[i], NULL, read_part, &parts[i]) != 0) return 1;
        }
        for (int i = 0; i < threads; i++) {
            pthread_join(running[i], NULL);
            sum += parts[i].sum;
        }
        double rate = (double)BYTES / (now() - start) / 1e9;
        best = rate > best ? rate : best;
    }
    printf("%.1f\n", best);
    return sum == 0; /* Uses the sum, so that the compiler keeps the reads. */
}
