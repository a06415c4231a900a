/* libcudart.so.13, as far as ONNX Runtime's CUDA provider uses it; build.py adds the names that only have to exist. */
#define _GNU_SOURCE
#include "device.h"
#include <driver_types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int last_error;
static int said(int error) { if (error && error != lost()) last_error = error; return error; } /* lost() says that */
/* A thread that never chose a device means the first. */
static void begin(void) { if (current_device() < 0) make_current(0); }
#define CALL(bytes) begin(); NOTE(bytes)

/* -- memory -- */
int cudaMalloc(void **p, size_t n) { CALL(n); return said(allocate(p, n, ON_DEVICE)); }
int cudaMallocAsync(void **p, size_t n, void *s) { CALL(n); return said(allocate(p, n, ON_DEVICE)); }
int cudaMallocFromPoolAsync(void **p, size_t n, void *pool, void *s) { CALL(n); return said(allocate(p, n, ON_DEVICE)); }
int cudaMallocHost(void **p, size_t n) { CALL(n); return said(allocate(p, n, PINNED)); }
int cudaHostAlloc(void **p, size_t n, unsigned f) { CALL(n); return said(allocate(p, n, PINNED)); }
int cudaFree(void *p) { CALL(0); return said(release(p, ON_DEVICE, __func__)); }
int cudaFreeAsync(void *p, void *s) { CALL(0); return said(release(p, ON_DEVICE, __func__)); }
int cudaFreeHost(void *p) { CALL(0); return said(release(p, PINNED, __func__)); }
int cudaMemGetInfo(size_t *f, size_t *t) { CALL(0); *t = total_bytes(); *f = free_bytes(current_device()); return said(lost()); }
int cudaMemPoolCreate(void **p, const void *q) { CALL(0); *p = calloc(1, 64); return OK; }
int cudaMemPoolDestroy(void *p) { CALL(0); free(p); return OK; }
int cudaMemPoolGetAttribute(void *p, int a, void *v) { CALL(0); *(uint64_t *)v = 0; return OK; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    CALL(0);
    int device = -1, where = where_is(p, &device);
    memset(a, 0, sizeof *a);
    a->type = where, a->device = device;
    a->devicePointer = where ? (void *)p : NULL, a->hostPointer = where == ON_DEVICE ? NULL : (void *)p;
    return OK;
}

/* -- streams, events, recordings -- */
int cudaStreamCreateWithFlags(stream **s, unsigned f) { CALL(0); return said(make_stream(s)); }
int cudaStreamCreate(stream **s) { CALL(0); return said(make_stream(s)); }
int cudaStreamDestroy(stream *s) { CALL(0); return said(end_stream(s)); }
int cudaStreamIsCapturing(stream *s, int *c) { CALL(0); *c = stream_is_recording(s); return OK; }
int cudaStreamBeginCapture(stream *s, int mode) { CALL(0); return said(begin_recording(s)); }
int cudaStreamEndCapture(stream *s, graph **g) { CALL(0); return said(end_recording(s, g)); }
int cudaGraphInstantiate(graph **x, graph *g, unsigned long long f) { CALL(0); return said(instantiate(x, g)); }
int cudaGraphLaunch(graph *x, stream *s) { CALL(0); return said(replay(x, s)); }
int cudaGraphDestroy(graph *g) { CALL(0); return said(end_graph(g)); }
int cudaGraphExecDestroy(graph *g) { CALL(0); return said(end_graph(g)); }
int cudaStreamSynchronize(stream *s) { CALL(0); return said(wait_for_stream(s, __func__)); }
int cudaDeviceSynchronize(void) { CALL(0); return said(wait_for_device(__func__)); }
int cudaStreamWaitEvent(stream *s, event *e, unsigned f) { CALL(0); return said(stream_waits_for(s, e)); }
int cudaEventCreateWithFlags(event **e, unsigned f) { CALL(0); return said(make_event(e, !(f & cudaEventDisableTiming))); }
int cudaEventCreate(event **e) { CALL(0); return said(make_event(e, 1)); }
int cudaEventRecord(event *e, stream *s) { CALL(0); return said(record_event(e, s)); }
int cudaEventRecordWithFlags(event *e, stream *s, unsigned f) { CALL(0); return said(record_event(e, s)); }
int cudaEventSynchronize(event *e) { CALL(0); return said(wait_for_event(e)); }
int cudaEventQuery(event *e) { CALL(0); return event_reached(e); }
int cudaEventDestroy(event *e) { CALL(0); return said(end_event(e)); }
int cudaEventElapsedTime(float *ms, event *a, event *b) { CALL(0); return said(elapsed(a, b, ms)); }

/* -- copies -- */
int cudaMemcpy(void *d, const void *s, size_t n, int k) { CALL(n); return said(copy(__func__, NULL, d, 0, s, 0, n, 1, k, 1)); }
int cudaMemcpyAsync(void *d, const void *s, size_t n, int k, stream *t) { CALL(n); return said(copy(__func__, t, d, 0, s, 0, n, 1, k, 0)); }
int cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int k, stream *t) { CALL(w * h); return said(copy(__func__, t, d, dp, s, sp, w, h, k, 0)); }
int cudaMemcpyFromSymbol(void *d, const void *s, size_t n, size_t o, int k) { CALL(n); memset(d, 0, n); return OK; }
int cudaMemset(void *d, int v, size_t n) { CALL(n); int e = set(__func__, NULL, d, 0, v, n, 1); return said(e ? e : wait_for_stream(NULL, __func__)); }
int cudaMemsetAsync(void *d, int v, size_t n, stream *s) { CALL(n); return said(set(__func__, s, d, 0, v, n, 1)); }

/* -- the device -- */
int cudaGetDevice(int *d) { begin(); *d = current_device(); return OK; }
int cudaSetDevice(int d) { NOTE(0); int e = make_current(d); return said(e ? e : lost()); }
int cudaGetDeviceCount(int *n) { NOTE(0); *n = device_count(); return OK; }
int cudaDriverGetVersion(int *v) { *v = 13000; return OK; }
int cudaRuntimeGetVersion(int *v) { *v = 13000; return OK; }
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    NOTE(0);
    if (d < 0 || d >= device_count()) return said(INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Stub %d", d);
    p->major = compute_capability() / 10, p->minor = compute_capability() % 10;
    p->totalGlobalMem = total_bytes(), p->sharedMemPerBlock = 49152, p->regsPerBlock = 65536, p->warpSize = 32;
    p->maxThreadsPerBlock = 1024, p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->multiProcessorCount = 58, p->maxThreadsPerMultiProcessor = 1536, p->sharedMemPerMultiprocessor = 102400;
    p->sharedMemPerBlockOptin = 101376, p->regsPerMultiprocessor = 65536, p->l2CacheSize = 48 << 20;
    p->unifiedAddressing = p->concurrentKernels = p->memoryPoolsSupported = 1, p->asyncEngineCount = 2;
    return said(lost());
}
int cudaDeviceGetAttribute(int *v, int a, int d) {
    switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = compute_capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *v = compute_capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *v = 58; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 101376; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 1536; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 102400; break;
    default: *v = 1;
    }
    return OK;
}
const char *cudaGetErrorName(int e) { return error_name(e); }
const char *cudaGetErrorString(int e) { return error_name(e); }
int cudaGetLastError(void) { int e = last_error; last_error = OK; return e ? e : lost(); }
int cudaPeekAtLastError(void) { return last_error ? last_error : lost(); }

/* -- kernels: they do nothing -- */
static struct { const void *function; const char *name; } *kernels;
static int kernel_count;
void **__cudaRegisterFatBinary(void *f) { static void *x[8]; return x; }
void __cudaRegisterFunction(void **h, const void *function, char *a, const char *name, int n, void *b, void *c, void *d, void *e, int *f) {
    static int room;
    if (kernel_count == room) kernels = realloc(kernels, (room = 2 * room + 1024) * sizeof *kernels);
    kernels[kernel_count].function = function, kernels[kernel_count++].name = name;
}
static int launched(const void *function, stream *s, dim grid, dim block) {
    const char *name = NULL;
    begin();
    for (int i = 0; getenv("CUDA_STUB_KERNELS") && i < kernel_count && !name; i++)
        if (kernels[i].function == function) name = kernels[i].name;
    return said(launch(s, name, grid, block, NULL, NULL));
}
int cudaLaunchKernel(const void *f, dim g, dim b, void **a, size_t m, stream *s) { return launched(f, s, g, b); }
int __cudaLaunchKernel(const void *f, dim g, dim b, void **a, size_t m, stream *s) { return launched(f, s, g, b); }
int cudaLaunchCooperativeKernel(const void *f, dim g, dim b, void **a, size_t m, stream *s) { return launched(f, s, g, b); }
int cudaLaunchKernelExC(const struct cudaLaunchConfig_st *c, const void *f, void **a) {
    return launched(f, (stream *)c->stream, (dim){c->gridDim.x, c->gridDim.y, c->gridDim.z}, (dim){c->blockDim.x, c->blockDim.y, c->blockDim.z});
}
int cudaLaunchHostFunc(stream *s, void (*f)(void *), void *p) { CALL(0); int e = wait_for_stream(s, __func__); f(p); return said(e); }
static __thread struct { dim g, b; size_t m; void *s; } configuration; /* of the next <<<...>>> */
unsigned __cudaPushCallConfiguration(dim g, dim b, size_t m, void *s) { configuration.g = g, configuration.b = b, configuration.m = m, configuration.s = s; return 0; }
int __cudaPopCallConfiguration(dim *g, dim *b, size_t *m, void *s) { *g = configuration.g, *b = configuration.b, *m = configuration.m, *(void **)s = configuration.s; return OK; }
int __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return OK; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->binaryVersion = a->ptxVersion = compute_capability(), a->numRegs = 32, a->maxDynamicSharedSizeBytes = 98304;
    return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned fl) { *n = 2; return OK; }
int cudaLibraryLoadData(void **l) { *l = calloc(1, 64); return OK; }
int cudaLibraryGetKernel(void **k) { *k = calloc(1, 64); return OK; }
int cudaGetDriverEntryPointByVersion(const char *s, void **p) { *p = NULL; return OK; }
