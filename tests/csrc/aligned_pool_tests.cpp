// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "harness.h"
#include "memory/aligned_pool.h"

using fuyou::AlignedPool;
using fuyou::kPageBytes;

TEST(pool_hands_out_exact_page_aligned_blocks)
{
    AlignedPool pool(10 * kPageBytes - 1);
    CHECK(pool.capacity_bytes() == 10 * kPageBytes);
    char* one = pool.try_allocate(1);
    char* three = pool.try_allocate(2 * kPageBytes + 1);
    CHECK(one == pool.base());
    CHECK(three == pool.base() + kPageBytes);
    CHECK(reinterpret_cast<std::uintptr_t>(one) % kPageBytes == 0);
    CHECK(pool.used_bytes() == 4 * kPageBytes);
    std::memset(three, 1, 3 * kPageBytes);
    CHECK(pool.largest_free_bytes() == 6 * kPageBytes);
    CHECK(pool.try_allocate(0) == pool.base() + 4 * kPageBytes);
    CHECK(pool.used_bytes() == 5 * kPageBytes);
}

TEST(pool_first_fit_reuses_the_lowest_hole)
{
    AlignedPool pool(8 * kPageBytes);
    char* a = pool.try_allocate(2 * kPageBytes);
    char* b = pool.try_allocate(kPageBytes);
    char* c = pool.try_allocate(3 * kPageBytes);
    char* d = pool.try_allocate(kPageBytes);
    pool.release(a);
    pool.release(c);
    CHECK(pool.try_allocate(3 * kPageBytes) == c);
    CHECK(pool.try_allocate(kPageBytes) == a);
    pool.release(b);
    pool.release(d);
}

TEST(pool_coalesces_with_both_neighbours)
{
    const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {2, 1, 0}, {1, 0, 2}};
    for (const auto& order : orders) {
        AlignedPool pool(3 * kPageBytes);
        char* blocks[3];
        for (char*& block : blocks) {
            block = pool.try_allocate(kPageBytes);
        }
        CHECK(pool.largest_free_bytes() == 0);
        for (const int index : order) {
            pool.release(blocks[index]);
        }
        CHECK(pool.largest_free_bytes() == 3 * kPageBytes);
        CHECK(pool.used_bytes() == 0);
        CHECK(pool.peak_bytes() == 3 * kPageBytes);
    }
}

TEST(pool_exhausted_gives_nullptr)
{
    AlignedPool pool(4 * kPageBytes);
    CHECK(pool.try_allocate(4 * kPageBytes + 1) == nullptr);
    CHECK(pool.try_allocate(UINT64_MAX) == nullptr);
    CHECK(pool.try_allocate(3 * kPageBytes) != nullptr);
    CHECK(pool.try_allocate(2 * kPageBytes) == nullptr);
    CHECK(pool.try_allocate(kPageBytes) != nullptr);
    CHECK(pool.try_allocate(0) == nullptr);
    AlignedPool empty(0);
    CHECK(empty.try_allocate(0) == nullptr);
    CHECK(empty.capacity_bytes() == 0);
}

TEST(pool_refuses_a_bad_release)
{
    AlignedPool pool(4 * kPageBytes);
    char* block = pool.try_allocate(2 * kPageBytes);
    CHECK_THROWS(std::invalid_argument, pool.release(block + kPageBytes));
    CHECK_THROWS(std::invalid_argument, pool.release(nullptr));
    CHECK_THROWS(std::invalid_argument, pool.release(block - kPageBytes));
    pool.release(block);
    CHECK_THROWS(std::invalid_argument, pool.release(block));
    CHECK(pool.used_bytes() == 0);
}

TEST(pool_leaves_what_is_in_a_released_block_until_it_is_handed_out)
{
    AlignedPool pool(4 * kPageBytes), other(4 * kPageBytes);
    std::vector<char*> blocks;
    for (const char byte : {0, 1, 2, 3}) {
        blocks.push_back(pool.try_allocate(kPageBytes));
        blocks.back()[7] = byte;
    }
    std::vector<AlignedPool::Left> left;
    for (char* const block : blocks) left.push_back(pool.leave(block, 100, true));
    CHECK_THROWS(std::invalid_argument, pool.release(blocks[0]));
    CHECK_THROWS(std::invalid_argument, pool.leave(blocks[0], 100, true));
    CHECK(pool.used_bytes() == 0 && pool.largest_free_bytes() == 4 * kPageBytes);
    CHECK(pool.peak_bytes() == 4 * kPageBytes);
    CHECK(other.try_take_back(left[0]) == nullptr);

    char* const back = pool.try_take_back(left[2]);
    CHECK(back == blocks[2] && back[7] == 2);
    CHECK(pool.used_bytes() == kPageBytes && pool.largest_free_bytes() == 2 * kPageBytes);
    CHECK(pool.try_take_back(left[2]) == nullptr);
    const AlignedPool::Left again = pool.leave(back, 100, true);
    CHECK(pool.try_take_back(left[2]) == nullptr);  // as what was left before

    char* const two = pool.try_allocate(2 * kPageBytes);
    CHECK(two == blocks[0]);
    CHECK(pool.try_take_back(left[0]) == nullptr && pool.try_take_back(left[1]) == nullptr);
    pool.release(two);
    CHECK(pool.try_take_back(left[0]) == nullptr && pool.try_take_back(left[1]) == nullptr);
    CHECK(pool.try_take_back(again) == blocks[2]);
    CHECK(pool.try_take_back(left[3]) == blocks[3] && blocks[3][7] == 3);
    pool.release(blocks[2]);
    pool.release(blocks[3]);

    // Of a part of a block: others have the rest, and then its second page.
    char* const large = pool.try_allocate(4 * kPageBytes);
    const AlignedPool::Left begin = pool.leave(large, kPageBytes + 1, true);
    char* const front = pool.try_take_back(begin);
    CHECK(front == large && pool.used_bytes() == 2 * kPageBytes);
    char* const rest = pool.try_allocate(2 * kPageBytes);
    CHECK(rest == large + 2 * kPageBytes);
    const AlignedPool::Left again_begin = pool.leave(front, kPageBytes + 1, true);
    pool.release(rest);
    CHECK(pool.try_allocate(kPageBytes) == large);
    CHECK(pool.try_allocate(kPageBytes) == large + kPageBytes);
    pool.release(large);
    CHECK(pool.try_take_back(again_begin) == nullptr);
}

TEST(pool_last_fit)
{
    AlignedPool pool(6 * kPageBytes);
    CHECK(pool.try_allocate_last(2 * kPageBytes) == pool.base() + 4 * kPageBytes);
    CHECK(pool.try_allocate(kPageBytes) == pool.base());
    CHECK(pool.try_allocate_last(kPageBytes) == pool.base() + 3 * kPageBytes);
    pool.release(pool.base() + 4 * kPageBytes);
    CHECK(pool.try_allocate_last(3 * kPageBytes) == nullptr);
    CHECK(pool.try_allocate_last(kPageBytes) == pool.base() + 5 * kPageBytes);
    CHECK(pool.try_allocate_last(2 * kPageBytes) == pool.base() + kPageBytes);
}

TEST(pool_spares_what_is_wanted)
{
    AlignedPool pool(8 * kPageBytes);
    std::vector<char*> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(pool.try_allocate(kPageBytes));
    const AlignedPool::Left second = pool.leave(blocks[1], 1, true);
    pool.leave(blocks[2], 1, false);
    for (const std::size_t i : {3, 4, 7}) pool.release(blocks[i]);
    const AlignedPool::Left sixth = pool.leave(blocks[5], 1, true);  // of 1 to 5, and 7
    CHECK(pool.try_allocate_beside_wanted(4 * kPageBytes) == nullptr);
    CHECK(pool.try_allocate_beside_wanted(3 * kPageBytes) == blocks[2]);
    CHECK(pool.try_allocate_beside_wanted(kPageBytes) == blocks[7]);
    CHECK(pool.try_allocate_beside_wanted(kPageBytes) == nullptr);
    pool.unwant(second);
    pool.unwant(second);
    CHECK(pool.try_take_back(second) == blocks[1]);
    const AlignedPool::Left unwanted = pool.leave(blocks[1], 1, false);
    CHECK(pool.try_allocate_beside_wanted(kPageBytes) == blocks[1]);
    CHECK(pool.try_take_back(unwanted) == nullptr);
    pool.unwant(unwanted);
    CHECK(pool.try_take_back(sixth) == blocks[5]);
    const AlignedPool::Left again = pool.leave(blocks[5], 1, false);
    CHECK(pool.try_allocate_beside_wanted(kPageBytes) == blocks[5]);
    CHECK(pool.try_take_back(again) == nullptr);
    CHECK(pool.try_allocate_beside_wanted(UINT64_MAX) == nullptr);
    CHECK(pool.used_bytes() == pool.capacity_bytes() && pool.base() == blocks[0]);
}

// What may be anywhere is placed as if nothing were left.
TEST(pool_is_not_cut_by_what_is_left)
{
    AlignedPool pool(57 * kPageBytes);
    std::vector<char*> blocks;
    for (const std::uint64_t size : {14, 14, 14, 11, 4})
        blocks.push_back(pool.try_allocate(size * kPageBytes));
    for (char* const block : blocks) pool.leave(block, kPageBytes, true);
    for (const std::uint64_t size : {4, 14, 14, 14, 11})
        CHECK(pool.try_allocate(size * kPageBytes) != nullptr);
}

TEST(pool_too_large_for_the_machine_is_bad_alloc)
{
    CHECK_THROWS(std::bad_alloc, AlignedPool(UINT64_MAX));
    CHECK_THROWS(std::bad_alloc, AlignedPool(1ULL << 60));
}

TEST(pool_is_shared_by_threads)
{
    AlignedPool pool(64 * kPageBytes);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&pool, t] {
            for (int i = 0; i < 500; ++i) {
                const std::uint64_t num_bytes = (1 + (i + t) % 5) * kPageBytes;
                if (char* block = pool.try_allocate(num_bytes)) {
                    block[num_bytes - 1] = static_cast<char>(t);
                    pool.release(block);
                }
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(pool.used_bytes() == 0);
    CHECK(pool.largest_free_bytes() == pool.capacity_bytes());
}

// Of a pool that is not inherited, a child of fork() gets no page.
TEST(pool_is_inherited_or_zeros)
{
    for (const bool inherited : {true, false}) {
        AlignedPool pool(4 * kPageBytes, inherited);
        char* block = pool.try_allocate(kPageBytes);
        block[5] = 7;
        const pid_t child = fork();
        if (child == 0) _exit(block[5]);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == (inherited ? 7 : 0));
        CHECK(block[5] == 7);
    }
}
