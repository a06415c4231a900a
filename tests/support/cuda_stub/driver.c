/* libcuda.so.1, as far as `cuda.bindings.driver` is used by the product; build.py adds all other names of cuda.h, which
   count themselves and say that they are not supported, and a table of all of them for cuGetProcAddress. */
#define _GNU_SOURCE
#include "device.h"
#include <cuda.h>
#undef cuGetProcAddress /* the old names are functions of their own here */
#undef cuEventElapsedTime
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef CUresult R;
#define NEEDS_CONTEXT if (current_device() < 0) { wrong("no context is current", __func__); return NO_CONTEXT; }

/* -- the device -- */
R cuInit(unsigned f) { NOTE(0); return OK; }
R cuDriverGetVersion(int *v) { NOTE(0); *v = 13000; return OK; }
R cuDeviceGetCount(int *n) { NOTE(0); *n = device_count(); return OK; }
R cuDeviceGet(CUdevice *d, int i) { NOTE(0); *d = i; return i < 0 || i >= device_count() ? INVALID_DEVICE : OK; }
R cuDeviceGetName(char *s, int n, CUdevice d) { NOTE(0); snprintf(s, n, "Stub %d", d); return OK; }
R cuDeviceTotalMem_v2(size_t *n, CUdevice d) { NOTE(0); *n = total_bytes(); return OK; }
R cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) { NOTE(0); memset(u, d, sizeof *u); return OK; }
R cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
    NOTE(0);
    switch (a) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *v = compute_capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *v = compute_capability() % 10; break;
    default: *v = 1;
    }
    return OK;
}
R cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { NOTE(0); *c = (CUcontext)(uintptr_t)(d + 1); return d < device_count() ? OK : INVALID_DEVICE; }
R cuDevicePrimaryCtxRelease_v2(CUdevice d) { NOTE(0); return OK; }
R cuCtxGetCurrent(CUcontext *c) { NOTE(0); *c = (CUcontext)(uintptr_t)(current_device() + 1); return OK; }
R cuCtxSetCurrent(CUcontext c) { NOTE(0); int e = make_current((int)(uintptr_t)c - 1); return e ? e : lost(); }
R cuCtxGetDevice(CUdevice *d) { NOTE(0); NEEDS_CONTEXT *d = current_device(); return OK; }
R cuCtxSynchronize(void) { NOTE(0); NEEDS_CONTEXT return wait_for_device(__func__); }

/* -- memory -- */
R cuMemAlloc_v2(CUdeviceptr *p, size_t n) { NOTE(n); return allocate((void **)p, n, ON_DEVICE); }
R cuMemAllocAsync(CUdeviceptr *p, size_t n, CUstream s) { NOTE(n); return allocate((void **)p, n, ON_DEVICE); }
R cuMemFree_v2(CUdeviceptr p) { NOTE(0); return release((void *)p, ON_DEVICE, __func__); }
R cuMemFreeAsync(CUdeviceptr p, CUstream s) { NOTE(0); NEEDS_CONTEXT return release((void *)p, ON_DEVICE, __func__); }
R cuMemHostAlloc(void **p, size_t n, unsigned f) { NOTE(n); return allocate(p, n, PINNED); }
R cuMemFreeHost(void *p) { NOTE(0); NEEDS_CONTEXT return release(p, PINNED, __func__); }
R cuMemGetInfo_v2(size_t *f, size_t *t) { NOTE(0); NEEDS_CONTEXT *t = total_bytes(); *f = free_bytes(current_device()); return lost(); }
struct pool { int magic, device; cuuint64_t threshold; };
enum { POOL = 0x9001 };
R cuMemPoolCreate(CUmemoryPool *p, const CUmemPoolProps *q) {
    NOTE(0);
    if (q->allocType != CU_MEM_ALLOCATION_TYPE_PINNED || q->location.type != CU_MEM_LOCATION_TYPE_DEVICE) { wrong("its properties", __func__); return INVALID_VALUE; }
    struct pool *made = calloc(1, sizeof *made);
    *made = (struct pool){POOL, q->location.id, 0};
    if (lost()) { free(made); return lost(); }
    *p = (CUmemoryPool)made;
    holds(1);
    return OK;
}
static struct pool *pool_of(CUmemoryPool p, const char *who) {
    struct pool *pool = (struct pool *)p;
    if (pool && pool->magic == POOL) return pool;
    wrong("not a pool, or destroyed", who);
    return NULL;
}
R cuMemPoolDestroy(CUmemoryPool p) { NOTE(0); struct pool *pool = pool_of(p, __func__); if (!pool) return INVALID_HANDLE; pool->magic = 0; holds(-1); return lost(); }
R cuMemAllocFromPoolAsync(CUdeviceptr *a, size_t n, CUmemoryPool p, CUstream s) { NOTE(n); NEEDS_CONTEXT return pool_of(p, __func__) ? allocate((void **)a, n, ON_DEVICE) : INVALID_HANDLE; }
R cuMemPoolSetAttribute(CUmemoryPool p, CUmemPool_attribute a, void *v) {
    NOTE(0);
    struct pool *pool = pool_of(p, __func__);
    if (!pool) return INVALID_HANDLE;
    if (a == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) pool->threshold = *(cuuint64_t *)v;
    if (pool->threshold == ~0ull) note("a pool that keeps its memory", 0);
    return OK;
}
R cuMemPoolGetAttribute(CUmemoryPool p, CUmemPool_attribute a, void *v) {
    NOTE(0);
    struct pool *pool = pool_of(p, __func__);
    if (!pool) return INVALID_HANDLE;
    *(cuuint64_t *)v = a == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ? pool->threshold : total_bytes() - free_bytes(pool->device);
    return OK;
}
R cuMemPoolTrimTo(CUmemoryPool p, size_t n) { NOTE(0); return OK; }
R cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
    NOTE(0);
    int device, where = where_is((void *)p, &device);
    if (where == PAGEABLE) return INVALID_VALUE;
    *(unsigned *)v = a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? (where == ON_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST) : (unsigned)device;
    return OK;
}

/* -- work -- */
#define S ((stream *)s)
R cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *h, size_t n, CUstream s) { NOTE(n); NEEDS_CONTEXT return copy(__func__, S, (void *)d, 0, h, 0, n, 1, HOST_TO_DEVICE, 0); }
R cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, CUstream s) { NOTE(n); NEEDS_CONTEXT return copy(__func__, S, h, 0, (void *)d, 0, n, 1, DEVICE_TO_HOST, 0); }
R cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr f, size_t n, CUstream s) { NOTE(n); NEEDS_CONTEXT return copy(__func__, S, (void *)d, 0, (void *)f, 0, n, 1, DEVICE_TO_DEVICE, 0); }
R cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream s) {
    NOTE(c->WidthInBytes * c->Height);
    NEEDS_CONTEXT
    if (c->srcMemoryType != CU_MEMORYTYPE_DEVICE || c->dstMemoryType != CU_MEMORYTYPE_DEVICE) { wrong("only between device and device", __func__); return INVALID_VALUE; }
    return copy(__func__, S, (void *)(c->dstDevice + c->dstXInBytes + c->dstY * c->dstPitch), c->dstPitch,
                (void *)(c->srcDevice + c->srcXInBytes + c->srcY * c->srcPitch), c->srcPitch, c->WidthInBytes, c->Height, DEVICE_TO_DEVICE, 0);
}
R cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *c, CUstream s) {
    NOTE(c->WidthInBytes * c->Height * c->Depth);
    NEEDS_CONTEXT
    if (c->srcMemoryType != CU_MEMORYTYPE_DEVICE || c->dstMemoryType != CU_MEMORYTYPE_DEVICE) { wrong("only between device and device", __func__); return INVALID_VALUE; }
    if (c->WidthInBytes > c->srcPitch || c->WidthInBytes > c->dstPitch) { wrong("a row longer than its pitch", __func__); return INVALID_PITCH; }
    if (c->Depth > 1 && (c->Height > c->srcHeight || c->Height > c->dstHeight)) { wrong("a slice higher than its height", __func__); return INVALID_VALUE; }
    size_t to[2] = {c->dstPitch, c->dstPitch * c->dstHeight}, from[2] = {c->srcPitch, c->srcPitch * c->srcHeight};
    size_t extent[3] = {c->WidthInBytes, c->Height, c->Depth};
    return copy_3d(__func__, S, (void *)c->dstDevice, to, (void *)c->srcDevice, from, extent, DEVICE_TO_DEVICE);
}
R cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream s) { NOTE(n); NEEDS_CONTEXT return set(__func__, S, (void *)d, 0, v, n, 1); }
R cuMemsetD2D8Async(CUdeviceptr d, size_t pitch, unsigned char v, size_t w, size_t h, CUstream s) { NOTE(w * h); NEEDS_CONTEXT return set(__func__, S, (void *)d, pitch, v, w, h); }
R cuStreamCreate(CUstream *s, unsigned f) { NOTE(0); NEEDS_CONTEXT return make_stream((stream **)s); }
R cuStreamDestroy_v2(CUstream s) { NOTE(0); return end_stream(S); }
R cuStreamSynchronize(CUstream s) { NOTE(0); NEEDS_CONTEXT return wait_for_stream(S, __func__); }
R cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) { NOTE(0); *c = stream_is_recording(S); return OK; }
R cuStreamBeginCapture_v2(CUstream s, CUstreamCaptureMode m) { NOTE(0); NEEDS_CONTEXT return begin_recording(S); }
R cuStreamEndCapture(CUstream s, CUgraph *g) { /* whatever it says, nothing is recorded any more */
    note(__func__, 0);
    NEEDS_CONTEXT
    int ended = end_recording(S, (graph **)g), fails = fails_on_demand(__func__);
    if (fails && !ended) end_graph(*(graph **)g), *g = NULL;
    return fails ? fails : ended;
}
R cuGraphInstantiateWithFlags(CUgraphExec *x, CUgraph g, unsigned long long f) { NOTE(0); return instantiate((graph **)x, (graph *)g); }
R cuGraphLaunch(CUgraphExec x, CUstream s) { NOTE(0); NEEDS_CONTEXT return replay((graph *)x, S); }
R cuGraphDestroy(CUgraph g) { NOTE(0); return end_graph((graph *)g); }
R cuGraphExecDestroy(CUgraphExec g) { NOTE(0); return end_graph((graph *)g); }
R cuEventCreate(CUevent *e, unsigned f) { NOTE(0); NEEDS_CONTEXT return make_event((event **)e, !(f & CU_EVENT_DISABLE_TIMING)); }
R cuEventDestroy_v2(CUevent e) { NOTE(0); return end_event((event *)e); }
R cuEventRecord(CUevent e, CUstream s) { NOTE(0); NEEDS_CONTEXT return record_event((event *)e, S); }
R cuEventSynchronize(CUevent e) { NOTE(0); NEEDS_CONTEXT return wait_for_event((event *)e); }
R cuEventQuery(CUevent e) { NOTE(0); return event_reached((event *)e); }
R cuEventElapsedTime_v2(float *ms, CUevent a, CUevent b) { NOTE(0); return elapsed((event *)a, (event *)b, ms); }
R cuEventElapsedTime(float *ms, CUevent a, CUevent b) { return cuEventElapsedTime_v2(ms, a, b); }

/* -- kernels of our own are really run: kernels.c has their source, compiled for the host -- */
extern void *stub_kernel(const char *name);
extern void stub_run(void *);
extern void *stub_arguments(void *function, dim grid, dim block, void **arguments);
R cuModuleLoadData(CUmodule *m, const void *image) {
    NOTE(0);
    NEEDS_CONTEXT
    if (!strstr(image, ".version") || !strstr(image, ".entry")) { wrong("not PTX", __func__); return 218; }
    if (lost()) return lost();
    *m = (CUmodule)strdup(image);
    holds(1);
    return OK;
}
R cuModuleUnload(CUmodule m) { NOTE(0); free(m); holds(-1); return OK; }
R cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
    NOTE(0);
    *f = strstr((char *)m, name) ? stub_kernel(name) : NULL;
    return *f ? OK : NOT_FOUND;
}
R cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned m, CUstream s, void **a, void **extra) {
    NOTE(0);
    NEEDS_CONTEXT
    dim grid = {gx, gy, gz}, block = {bx, by, bz};
    return launch(S, "ours", grid, block, stub_run, stub_arguments(f, grid, block, a));
}

R cuGetErrorName(CUresult e, const char **s) { *s = error_name(e); return OK; }
R cuGetErrorString(CUresult e, const char **s) { *s = error_name(e); return OK; }
R cuGetExportTable(const void **table, const CUuuid *id) { NOTE(0); *table = NULL; return NOT_FOUND; }

/* -- looking functions up -- */
extern const struct entry { const char *name; void *function; } entries[];
extern const int entry_count;
R cuGetProcAddress_v2(const char *name, void **f, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    *f = NULL;
    for (int i = 0; i < entry_count && !*f; i++)
        if (!strcmp(entries[i].name, name)) *f = entries[i].function;
    if (status) *status = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return OK;
}
R cuGetProcAddress(const char *name, void **f, int version, cuuint64_t flags) { return cuGetProcAddress_v2(name, f, version, flags, NULL); }
