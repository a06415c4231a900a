/* The product's own kernels, compiled for the host from the same source and really run, thread by thread. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z, w; } uint4;
static __thread dim threadIdx, blockIdx, blockDim, gridDim;
#define KERNEL static
#include "gather.cu"

typedef void kernel(void *, const void *, const long long *, long long, long long, long long, long long, long long);
struct call { kernel *function; dim grid, block; void *pointers[3]; long long numbers[5]; };

void *stub_kernel(const char *name) {
    return !strcmp(name, "gather_16") ? (void *)gather_16 : !strcmp(name, "gather_1") ? (void *)gather_1 : NULL;
}

void *stub_arguments(void *function, dim grid, dim block, void **arguments) {
    struct call *call = calloc(1, sizeof *call);
    call->function = (kernel *)function, call->grid = grid, call->block = block;
    for (int i = 0; i < 3; i++) call->pointers[i] = real(*(void **)arguments[i]);
    for (int i = 0; i < 5; i++) call->numbers[i] = *(long long *)arguments[3 + i];
    return call;
}

void stub_run(void *argument) {
    struct call *c = argument;
    gridDim = c->grid, blockDim = c->block;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            c->function(c->pointers[0], c->pointers[1], (long long *)c->pointers[2], c->numbers[0], c->numbers[1], c->numbers[2], c->numbers[3], c->numbers[4]);
}
