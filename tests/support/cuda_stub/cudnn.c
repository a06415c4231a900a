/* libcudnn.so.9: enough for ONNX Runtime's recurrent layers to be made and to be called; build.py adds the rest. */
#include "device.h"
typedef int R;
size_t cudnnGetVersion(void) { return 91000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int e) { return "a stub's status"; }
void cudnnGetLastErrorString(char *text, size_t n) { if (n) *text = 0; }
R cudnnDropoutGetStatesSize(void *h, size_t *n) { NOTE(0); *n = 1024; return 0; }
R cudnnGetRNNTempSpaceSizes(void *h, void *d, int mode, void *x, size_t *work, size_t *reserve) { NOTE(0); *work = 1 << 20; if (reserve) *reserve = 0; return 0; }
R cudnnGetRNNWeightSpaceSize(void *h, void *d, size_t *n) { NOTE(0); *n = 16 << 20; return 0; }
R cudnnGetRNNWeightParams(void *h, void *d, int layer, size_t n, const void *space, int id, void *md, void **m, void *bd, void **b) { NOTE(0); if (m) *m = (void *)space; if (b) *b = (void *)space; return 0; }
R cudnnGetTensorNdDescriptor(void *d, int wanted, int *type, int *n, int dims[], int strides[]) { NOTE(0); *type = 0; *n = 3; for (int i = 0; i < 3 && i < wanted; i++) dims[i] = strides[i] = 1; return 0; }
R cudnnGetReductionWorkspaceSize(void *h, void *r, void *a, void *c, size_t *n) { NOTE(0); *n = 1024; return 0; }
R cudnnGetReductionIndicesSize(void *h, void *r, void *a, void *c, size_t *n) { NOTE(0); *n = 1024; return 0; }
R cudnnGetConvolutionForwardWorkspaceSize(void *h, void *x, void *w, void *c, void *y, int algo, size_t *n) { NOTE(0); *n = 1024; return 0; }
