// The C face of the neighbour aggregations: plain structures and functions, called through ctypes with raw pointers, so
// that nothing depends on a version of Python or torch, and the interpreter's lock is released during a call.
// The fields mirror kernels/aggregate_cpu.py; kernels/aggregate_reference.py specifies what is computed.
//
// T is float or double, as Run says. Arrays are dense; H are heads, D values a head. Edge values lie in the natural
// order of edges. Every row of an output is written by one thread, its edges in order: results do not depend on the
// number of threads.
#pragma once
#include <cstdint>

struct Rows {                // edges sorted by the row they are reduced into
    const int64_t* indptr;   // [rows + 1]
    const int32_t* columns;  // [edges] row of x that each edge reads
    const int32_t* edge_ids; // [edges] natural number of each edge, or null: in order
    int64_t rows;
};

struct Run {
    int32_t is_double;
    int32_t threads; // at least 1
    int32_t isa;     // the best instruction set to use: 0 baseline, 2 AVX2, 3 AVX-512
    int32_t reserved;
};

struct SumCall { // out[r] = sum over edges of weight[edge] * x[column], divided by divisors[r]
    const void* x;           // T [., H, D]
    const void* weight;      // T [edges, H] or null
    void* out;               // T [rows, H, D]
    const int64_t* divisors; // [rows] or null
    const int64_t* targets;  // [rows] or null; else out[targets[r]] is the sum so far, to be continued
    int64_t heads, dim;
};

struct ExtremeCall { // out[r] = the largest (smallest) message of the row, zero without edges
    const void* x;          // T [., H, D]
    const void* weight;     // T [edges, H] or null
    void* out;              // T [rows, H, D]
    void* ties;             // T [rows, H, D] how many messages are equal to it, or null
    const int64_t* targets; // [rows] or null; else out[targets[r]] and ties[targets[r]] are those of messages before
    const int64_t* before;  // [rows] how many messages these are, with targets
    int64_t heads, dim;
    int32_t smallest; // 0 or 1
    int32_t reserved;
};

struct TiesCall { // by source: out[r] = sum over edges of weight * share[column] where weight * x[r] is extreme[column]
    const void* x;       // T [rows, H, D]
    const void* weight;  // T [edges, H] or null
    const void* extreme; // T [., H, D]
    const void* share;   // T [., H, D]
    void* out;           // T [rows, H, D]
    int64_t heads, dim;
};

enum EdgeOp : int32_t { ADD = 0, SUB = 1, MUL = 2, DOT = 3, DOT_OF_TIES = 4 };

struct EdgeCall { // out[edge] = u[column] op v[r]
    const void* u;       // T [., H, D]
    const void* v;       // T [rows, H, D]
    void* out;           // T [edges, H, D], or [edges, H] for the dots
    const void* weight;  // T [edges, H], for DOT_OF_TIES: only where weight * u[column] is extreme[r]
    const void* extreme; // T [rows, H, D]
    int64_t heads, dim;
    int32_t op;
    int32_t reserved;
};

struct SoftmaxCall {
    const void* value;    // T [edges, H]
    const void* gradient; // T [edges, H] or null: then forward, else value is the softmax and this its gradient
    void* out;            // T [edges, H]
    int64_t heads;
};

struct AttentionCall { // its edge values but keys stand in the sorted order
    const void* x;            // T [., H, D]
    const void* source_score; // T [., H], by column
    const void* target_score; // T [rows, H]
    const int64_t* keys;      // [edges] of the mask, or null: nothing is dropped
    void* out;                // T [rows, H, D] forward only
    void* alpha;              // T [edges, H] written forward, read backward: the softmax, negative where dropped
    const void* gradient;     // T [rows, H, D] of out, backward
    void* edge_values;        // T [edges, 2, H] backward: weights, and gradients of source_score[column] + target_score[r]
    void* target_gradient;    // T [rows, H] backward
    int64_t heads, dim;
    double negative_slope, scale; // scale: of weights that are not dropped
    uint64_t key;
    uint32_t threshold;
    int32_t backward; // an empty gradient may be null, so that it can not tell
};

struct SourcesCall { // by source: the rest of the backward pass of attention
    const void* gradient;    // T [., H, D]
    const void* edge_values; // T [edges, 2, H], of each edge at its edge_ids
    void* out;               // T [rows, H, D] of x
    void* source_gradient;   // T [rows, H]
    int64_t heads, dim;
};

struct ScoresCall { // vector . leaky_relu(x[column] + own[r]) of each edge and head
    const void* x;        // T [., H, D]
    const void* own;      // T [rows, H, D]
    const void* vector;   // T [H, D]
    const void* gradient; // T [edges, H] or null: then out is the scores, else the gradient of own
    void* out;            // T [edges, H] or [rows, H, D]
    void* of_vector;      // T [rows, H, D] what the edges of each row add to the gradient of the vector, or null
    int64_t heads, dim;
    double negative_slope;
};

extern "C" void sylvie_aggregate_sum(const Rows*, const Run*, const SumCall*);
extern "C" void sylvie_aggregate_extreme(const Rows*, const Run*, const ExtremeCall*);
extern "C" void sylvie_aggregate_ties(const Rows*, const Run*, const TiesCall*);
extern "C" void sylvie_aggregate_edges(const Rows*, const Run*, const EdgeCall*);
extern "C" void sylvie_aggregate_softmax(const Rows*, const Run*, const SoftmaxCall*);
extern "C" void sylvie_aggregate_attention(const Rows*, const Run*, const AttentionCall*);
extern "C" void sylvie_aggregate_sources(const Rows*, const Run*, const SourcesCall*);
extern "C" void sylvie_aggregate_scores(const Rows*, const Run*, const ScoresCall*);
extern "C" int32_t sylvie_aggregate_isa(); // the best instruction set of this machine

// The sizes of the structures above, so that a caller notices that it was written for others.
extern "C" int64_t sylvie_aggregate_sizes();
