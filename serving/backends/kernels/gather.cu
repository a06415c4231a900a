// Compaction of a cache: entry i of each row of the target becomes entry index[i] of the same row of the source, which
// lies elsewhere. gather.ptx is made of this by `python -m tests.support.cuda_stub.kernels`; a test compares the two.
// An entry has `words` words, and so are the pitches counted.
#ifndef KERNEL  // a test compiles it for the host
#define KERNEL extern "C" __global__
#endif

#define GATHER(name, word)                                                                                            \
    KERNEL void name(word *target, const word *source, const long long *index, long long count, long long words,      \
                     long long rows, long long target_pitch, long long source_pitch) {                                \
        long long all = rows * count * words, step = (long long)gridDim.x * blockDim.x;                               \
        for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {                    \
            long long word_of = i % words, entry = i / words % count, row = i / words / count;                        \
            target[row * target_pitch + entry * words + word_of] =                                                    \
                source[row * source_pitch + index[entry] * words + word_of];                                          \
        }                                                                                                             \
    }

GATHER(gather_16, uint4)
GATHER(gather_1, unsigned char)
