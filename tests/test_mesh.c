/* Compares the mesh of ranks with nested loops: coordinates and groups. */
#include <string.h>

#include "kernels/runtime/mesh.h"
#include "tests/test.h"
#include "tests/kit.h"

enum { MOST = 3, MESHES = 729, MOST_RANKS = 2048 };

/* Computes the coordinates of every rank by counting like an odometer. Dimension 0 is the
 * fastest. */
static int coordinates[MOST_RANKS][MESH_DIMS];

static int count_ranks(const Mesh *m)
{
    int n = 0;
    for (int p = 0; p < m->size[MESH_PIPELINE]; p++)
        for (int r = 0; r < m->size[MESH_REPLICA]; r++)
            for (int h = 0; h < m->size[MESH_HOST]; h++)
                for (int s = 0; s < m->size[MESH_SHARD]; s++)
                    for (int c = 0; c < m->size[MESH_CONTEXT]; c++)
                        for (int t = 0; t < m->size[MESH_TENSOR]; t++, n++) {
                            int *at = coordinates[n];
                            at[MESH_PIPELINE] = p, at[MESH_REPLICA] = r, at[MESH_HOST] = h,
                            at[MESH_SHARD] = s, at[MESH_CONTEXT] = c, at[MESH_TENSOR] = t;
                        }
    return n;
}

static bool together(int a, int b, int g)
{
    for (int d = 0; d < MESH_DIMS; d++)
        if (!(g >> d & 1) && coordinates[a][d] != coordinates[b][d])
            return false;
    return true;
}

static void check_group(const Mesh *m, int ranks, int g)
{
    int group[MOST_RANKS];
    for (int a = 0; a < ranks; a++)
        group[a] = mesh_group(m, a, (Ranks)g);
    for (int a = 0; a < ranks; a++) {
        int members = 0, before = 0;
        for (int b = 0; b < ranks; b++) {
            const bool same = together(a, b, g);
            members += same;
            before += same && b < a;
            if ((group[a] == group[b]) != same)
                fail_msg("ranks %d and %d of %d, group %#x: %d, %d", a, b, ranks, g, group[a],
                         group[b]);
        }
        assert_int_equal(mesh_group_size(m, (Ranks)g), members);
        assert_int_equal(mesh_group_rank(m, a, (Ranks)g), before);
    }
}

TEST(test_meshes)
{
    /* every mesh of 1 to MOST ranks in each dimension */
    for (int code = 0; code < MESHES; code++) {
        Mesh m;
        for (int d = 0, rest = code; d < MESH_DIMS; d++, rest /= MOST)
            m.size[d] = rest % MOST + 1;
        const int ranks = count_ranks(&m);
        assert_int_equal(mesh_ranks(&m), ranks);
        for (int rank = 0; rank < ranks; rank++)
            for (int d = 0; d < MESH_DIMS; d++)
                assert_int_equal(mesh_coordinate(&m, rank, (MeshDim)d), coordinates[rank][d]);
        if (ranks <= 36)
            for (int g = 0; g <= RANKS_ALL; g++)
                check_group(&m, ranks, g);
    }
}

/* The example in mesh.h. */
TEST(test_replicas_of_shards)
{
    const Mesh m = mesh_of_shards(8, 4);
    for (int rank = 0; rank < 8; rank++) {
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_SHARD), rank % 4);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_REPLICA), rank / 4);
    }
    assert_int_equal(mesh_group_size(&m, RANKS_SHARD), 4);
    assert_int_equal(mesh_group_size(&m, RANKS_REPLICA), 2);
    assert_int_equal(mesh_group(&m, 0, RANKS_REPLICA), mesh_group(&m, 4, RANKS_REPLICA));
}

/* 8 ranks: 2 replicas of 4 shards, with 2 context ranks. */
TEST(test_context)
{
    const Mesh m = mesh_of_context(8, 4, 2);
    for (int rank = 0; rank < 8; rank++) {
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_CONTEXT), rank % 2);
        assert_int_equal(mesh_group(&m, rank, RANKS_CONTEXT), rank / 2);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_DATA), rank / 2);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_SHARD), rank % 4);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_REPLICA), rank / 4);
    }
    assert_int_equal(mesh_group_size(&m, RANKS_DATA), 4);
}

/* 16 ranks: 2 stages of 2 replicas of 4 shards, with 2 context ranks. */
TEST(test_stages)
{
    const Mesh m = mesh_of_stages(16, 2, 4, 2);
    for (int rank = 0; rank < 16; rank++) {
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_PIPELINE), rank / 8);
        assert_int_equal(mesh_group(&m, rank, RANKS_PIPELINE), rank % 8);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_SHARD), rank % 4);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_REPLICA), rank / 4 % 2);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_DATA), rank / 2 % 4);
        assert_int_equal(mesh_group(&m, rank, RANKS_SEQUENCE), rank / 2 % 4);
        assert_int_equal(mesh_group(&m, rank, RANKS_COPY), rank / 4 % 2);
    }
    assert_int_equal(mesh_group_size(&m, RANKS_SEQUENCE), 4);
    assert_int_equal(mesh_group_size(&m, RANKS_COPY), 8);
}

/* 16 ranks: 2 replicas of 2 shards, with 2 context ranks and 2 tensor ranks. */
TEST(test_tensor)
{
    const Mesh m = mesh_of_tensor(16, 1, 4, 2, 2);
    for (int rank = 0; rank < 16; rank++) {
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_TENSOR), rank % 2);
        assert_int_equal(mesh_group(&m, rank, RANKS_TENSOR), rank / 2);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_CONTEXT), rank / 2 % 2);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_SHARD), rank / 2 % 4);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_STAGE), rank % 8);
        assert_int_equal(mesh_group(&m, rank, RANKS_SEQUENCE), rank / 4);
    }
    assert_int_equal(mesh_group_size(&m, RANKS_DATA), 4);
}

/* 16 ranks on 4 hosts: 2 replicas of 8 shards, with 2 context ranks. Groups that do not fill hosts
 * stay as they are. */
TEST(test_hosts)
{
    Mesh m = mesh_of_context(16, 8, 2);
    mesh_cut_at_hosts(&m, 3);
    mesh_cut_at_hosts(&m, 16);
    assert_int_equal(mesh_group_size(&m, RANKS_HOSTS), 1);
    mesh_cut_at_hosts(&m, 4);
    for (int rank = 0; rank < 16; rank++) {
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_NEAR), rank % 4);
        assert_int_equal(mesh_group(&m, rank, RANKS_NEAR), rank / 4);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_HOSTS), rank / 4 % 2);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_SHARD), rank % 8);
        assert_int_equal(mesh_group_rank(&m, rank, RANKS_DATA), rank / 2);
    }
}

/* ---- up to 2048 ranks ------------------------------------------------------------------------ */

/* Every group of g has the same number of ranks. No two ranks of a group have the same index, and
 * the indices are in the order of the ranks. The ranks of a group differ in no dimension outside of
 * g. */
static void check_partition(const Mesh *m, int g)
{
    static int members[MOST_RANKS], first[MOST_RANKS];
    const int ranks = mesh_ranks(m), size = mesh_group_size(m, (Ranks)g), groups = ranks / size;
    memset(members, 0, sizeof *members * (size_t)groups);
    for (int rank = 0; rank < ranks; rank++) {
        const int group = mesh_group(m, rank, (Ranks)g), index = mesh_group_rank(m, rank, (Ranks)g);
        assert_in_range(group, 0, groups - 1);
        if (index == 0)
            first[group] = rank;
        if (index != members[group]++)
            fail_msg("rank %d of %d is number %d of group %d of dimensions %#x, after %d others",
                     rank, ranks, index, group, g, members[group] - 1);
        if (!together(rank, first[group], g))
            fail_msg("ranks %d and %d are in a group of dimensions %#x; they differ in others",
                     first[group], rank, g);
    }
    for (int i = 0; i < groups; i++)
        assert_int_equal(members[i], size);
}

/* The groups that the program uses. Dimensions of size 1 change nothing, so many of the groups are
 * equal. */
static void check_groups(const Mesh *m)
{
    static const Ranks used[] = { RANKS_REPLICA, RANKS_CONTEXT, RANKS_TENSOR,   RANKS_STAGE,
                                  RANKS_DATA,    RANKS_SHARD,   RANKS_PIPELINE, RANKS_SEQUENCE,
                                  RANKS_COPY,    RANKS_NEAR,    RANKS_HOSTS,    RANKS_ALL };
    bool seen[RANKS_ALL + 1] = { false };
    int large = 0;
    count_ranks(m);
    for (int d = 0; d < MESH_DIMS; d++)
        large |= m->size[d] > 1 ? 1 << d : 0;
    for (size_t i = 0; i < sizeof used / sizeof used[0]; i++) {
        if (!seen[used[i] & large])
            check_partition(m, used[i]);
        seen[used[i] & large] = true;
    }
}

static int checked;

/* Visits all meshes of `ranks` ranks whose dimensions below d are given. */
static void check_meshes(Mesh *m, int d, int ranks)
{
    if (d == MESH_DIMS - 1) {
        m->size[d] = ranks;
        check_groups(m);
        checked++;
        return;
    }
    for (int size = 1; size <= ranks; size++)
        if (ranks % size == 0) {
            m->size[d] = size;
            check_meshes(m, d + 1, ranks / size);
        }
}

/* Every mesh of these numbers of ranks. For 2^k ranks there are (k + 5 over 5) meshes. */
TEST(test_many_ranks)
{
    static const int other[] = { 3, 6, 12, 24, 30, 36, 48, 56, 60, 96, 120, 243, 384, 1000, 2047 };
    Mesh m;
    for (int k = 0; 1 << k <= MOST_RANKS; k++) {
        checked = 0;
        check_meshes(&m, 0, 1 << k);
        assert_int_equal(checked, (k + 5) * (k + 4) * (k + 3) * (k + 2) * (k + 1) / 120);
    }
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++)
        check_meshes(&m, 0, other[i]);
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
