// A warp on the host: what kernels/cuda/codec.cu uses of CUDA, for a C++ compiler. The 32 lanes of a warp are coroutines
// on one thread. A collective deposits the lane's value and hands on to the next lane; when the lane's turn comes again
// every other lane has deposited its own. Two boxes alternate, since a fast lane may reach the next collective before a
// slow one has read the last. Warps and blocks run one after another.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __device__ static
#define __global__
#define __forceinline__ inline
#define __restrict__ __restrict

using std::max;
using std::min;

struct Dim {
    unsigned x;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;

class Warp {
  public:
    static constexpr int LANES = 32;

    void run(unsigned first_thread, const std::function<void()>& kernel) {
        stacks.resize(LANES * STACK);
        body = &kernel;
        for (lane = 0; lane < LANES; ++lane) {
            turns[lane] = 0;
            done[lane] = false;
            getcontext(&lanes[lane]);
            lanes[lane].uc_stack.ss_sp = stacks.data() + lane * STACK;
            lanes[lane].uc_stack.ss_size = STACK;
            lanes[lane].uc_link = &scheduler;
            makecontext(&lanes[lane], &Warp::start, 0);
        }
        for (bool running = true; running;) {
            running = false;
            for (lane = 0; lane < LANES; ++lane) {
                if (done[lane]) continue;
                threadIdx.x = first_thread + unsigned(lane);
                swapcontext(&scheduler, &lanes[lane]);
                running = true;
            }
        }
    }

    // Deposits this lane's value, waits for all others', and returns the one of lane `from(my lane)`.
    template <class T> void exchange(T value, T (&all)[LANES]) {
        char(&box)[LANES][8] = boxes[turns[lane]++ % 2];
        std::memcpy(box[lane], &value, sizeof(T));
        swapcontext(&lanes[lane], &scheduler);
        for (int i = 0; i < LANES; ++i) std::memcpy(&all[i], box[i], sizeof(T));
    }

    int lane = 0;

  private:
    static void start();
    static constexpr size_t STACK = 1 << 16;
    std::vector<char> stacks; // of the lanes, kept from warp to warp
    ucontext_t scheduler, lanes[LANES];
    char boxes[2][LANES][8];
    unsigned turns[LANES];
    bool done[LANES];
    const std::function<void()>* body = nullptr;
};

static Warp warp;

void Warp::start() {
    (*warp.body)();
    warp.done[warp.lane] = true;
}

template <class T> T shuffle(T value, int from) {
    T all[Warp::LANES];
    warp.exchange(value, all);
    return all[from & 31];
}
template <class T> T __shfl_sync(unsigned, T value, int from) { return shuffle(value, from); }
template <class T> T __shfl_xor_sync(unsigned, T value, int lanes) { return shuffle(value, warp.lane ^ lanes); }
template <class T> T __shfl_down_sync(unsigned, T value, int lanes) {
    return shuffle(value, warp.lane + lanes < 32 ? warp.lane + lanes : warp.lane);
}
static inline unsigned __ballot_sync(unsigned, int predicate) {
    int all[Warp::LANES];
    warp.exchange(predicate, all);
    unsigned bits = 0;
    for (int i = 0; i < Warp::LANES; ++i) bits |= unsigned(all[i] != 0) << i;
    return bits;
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline int __float2int_rd(float value) { return int(std::floor(value)); }
static inline int __float2int_ru(float value) { return int(std::ceil(value)); }
static inline float __ll2float_rn(long long value) { return float(value); }

template <class Kernel> void launch(unsigned blocks, unsigned threads, const Kernel& kernel) {
    const std::function<void()> body = kernel;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (unsigned first = 0; first < threads; first += Warp::LANES) warp.run(first, body);
}
